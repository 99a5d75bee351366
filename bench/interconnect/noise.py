"""System noise: how long a fixed piece of work really takes, repeated on every rank.

Nothing is sent. Each sample computes the same power of the same number, which stays in the first
cache, so whatever a sample takes longer than the fastest was lost to the system, to other programs,
or to the clock of the processor. Such a detour on one rank delays all of them at the next barrier.
Source: Hoefler, Schneider, Lumsdaine, Characterizing the influence of system noise on large-scale
applications by simulation, SC 2010; the fixed work quantum of Sottile and Minnich.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench import results
from bench.interconnect.cases import Case
from bench.timing import seconds_of

PLAIN = "Python"
QUANTUM_NS = 200_000
LEAST_SECONDS, MOST = 5.0, 100_000  # of each rank: the time, and the samples that are kept
BASE, MODULUS = 3, (1 << 521) - 1  # a Mersenne prime: every step of a power costs the same
FIRST_BITS, TAKES = 512, 20
EDGES_US = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


class Noise(Case):
    """A fixed quantum of work. Comm: one broadcast, which makes it the same on all ranks."""

    name, sized, sync = "noise", False, "none"
    vias = (PLAIN,)

    def __init__(self, setup, via: str):
        super().__init__(setup, via)
        bits = np.array([self.bits()], np.int64)
        self.mpi.Bcast(bits, root=0)
        self.exponent = (1 << int(bits[0])) - 1

    @staticmethod
    def bits() -> int:
        """Return the bits of the exponent with which a quantum takes about QUANTUM_NS here."""
        took = seconds_of(partial(pow, BASE, (1 << FIRST_BITS) - 1, MODULUS), TAKES)
        return max(1, round(FIRST_BITS * QUANTUM_NS * 1e-9 / min(took)))

    def planned(self, plan):
        """Return all of the time, at least LEAST_SECONDS: a known median reveals no detours."""
        least = min(LEAST_SECONDS, 20 * plan.budget)  # 1 s of a quick run
        return plan._replace(budget=max(plan.budget, least), target=-1.0, most=MOST)

    def prepare(self):
        pass

    def run(self):
        pow(BASE, self.exponent, MODULUS)

    def check(self):
        return []


def detours_us(row: dict):
    """Return by how much each sample exceeded the fastest one of its rank: (samples, ranks)."""
    took = np.subtract(row["left_ns"], row["entered_ns"])
    return (took - took.min(axis=0)) * 1e-3


def noise_lines(row: dict) -> str:
    """Return, for each rank, the share of time lost, and how many detours of each length per
    second.
    """
    took, detours = np.subtract(row["left_ns"], row["entered_ns"]), detours_us(row)
    seconds = took.sum(axis=0) * 1e-9
    lines = []
    for place, rank in enumerate(row["ranks"]):
        own = detours[:, place]
        counts, _ = np.histogram(own, [*EDGES_US, np.inf])
        lines.append(
            {
                "rank": rank,
                "quantum_us": f"{took[:, place].min() * 1e-3:.1f}",
                "lost_percent": f"{own.sum() * 1e-6 / seconds[place] * 100:.3f}",
                "longest_us": f"{own.max():.1f}",
                **{
                    f"from_{low}_us": count / seconds[place]
                    for low, count in zip(EDGES_US, counts, strict=True)
                },
            }
        )
    return results.text_table(lines)
