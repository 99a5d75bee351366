"""Lives of runs, from training to generation, over all combinations of choices, against one rank.

    mpiexec -n 4 python -m bench.combinations                                  # all legal pairs
    mpiexec -n 4 python -m bench.combinations --triples --seconds 480 --json FILE

In a life, a run trains 3 steps, evaluates, samples, saves, resumes on the layout of another case,
exports and generates. Its losses, held-out losses, weights and texts must be those of one rank. The
cases contain each legal pair of values. With --triples more cases follow until the time is over,
each with many new triples. Exit code 1 means that a life differs.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

from bench import results
from bench.combinations import kept
from bench.combinations.array import Completion, Coverage, triples
from bench.combinations.choices import CHOICES, settings_of, words_of
from bench.combinations.life import live_all
from bench.program import Outcome, Program
from mpipar.comm.hosts import quiet_barrier
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError

RANKS = 4


def add_flags(parser) -> None:
    """Add the flags that say for how long lives are run."""
    parser.add_argument("--triples", action="store_true", help="continue after the pairs")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        help="start no life later than this many seconds after the first (480)",
    )


def live(args, session) -> Outcome | int:
    """Run the lives and print what differs; code 1 if any does."""
    world = session.world
    if world.size != RANKS:
        raise UsageError(
            f"{world.size} ranks: the cases are for {RANKS}; start them with mpiexec -n {RANKS}"
        )
    tally = Tally(args) if world.rank == 0 else None
    quiet_barrier(world)
    with tempfile.TemporaryDirectory(prefix="mpipar-lives-") as own:
        folder = Path(world.bcast(own))

        def where(text):
            session.where = lambda: text

        for case, check in live_all(world, folder, tally and tally.cases(), where=where):
            if tally:
                tally.add(case, check)
        quiet_barrier(world)
    return tally.outcome() if tally else EXIT_OK


class Tally:
    """The cases of one call, their results, and which pairs and triples occurred. World rank 0."""

    def __init__(self, args):
        self.args = args
        arrays = kept.read()
        self.array, self.illegal = arrays["pairs"], arrays["illegal"]
        self.start = perf_counter()
        self.seen = {2: Coverage(2), **({3: Coverage(3)} if args.triples else {})}
        self.count, self.wrong, self.rows = 0, [], []

    def cases(self):
        """Yield the cases, until the time is over."""
        more = (
            triples(self.seen[3], [part for part, _ in self.illegal], Completion())
            if self.args.triples
            else ()
        )
        for case in itertools.chain(self.array, more):
            if perf_counter() - self.start > self.args.seconds:
                return
            for seen in self.seen.values():
                seen.add(case)
            yield case

    def add(self, case, check) -> None:
        """Count a life, and print what is wrong with it."""
        self.count += 1
        if check.wrong:
            self.wrong.append(case["number"])
            print(
                f"case {case['number']} differs: mpipar train"
                f" {' '.join(words_of(settings_of(case)))}"
            )
            for text in check.wrong:
                print(f"  {text}", flush=True)
        if self.count == len(self.array):
            self.rows.append(self.row("pair", 2))

    def row(self, name: str, strength: int) -> dict:
        """Return the figures of all cases so far; illegal triples contain an illegal pair."""
        seen = self.seen[strength]
        legal, illegal = seen.different(), seen.holding([part for part, _ in self.illegal])
        legal &= ~illegal
        return {
            "of_each": name,
            "cases": self.count,
            "differ": len(self.wrong),
            "legal": int(legal.sum()),
            "occurred": int((legal & seen.seen).sum()),
            "illegal": int(illegal.sum()),
            "seconds": round(perf_counter() - self.start),
        }

    def outcome(self) -> Outcome:
        """Return the outcome."""
        if self.args.triples:
            self.rows.append(self.row("triple", 3))
        refused = dict(Counter(why for _, why in self.illegal).most_common())
        table = results.text_table(
            [{"refusal": why, "pairs": count} for why, count in refused.items()]
        )
        return Outcome(
            self.rows or [self.row("pair", 2)],
            {"ranks": RANKS, "choices": len(CHOICES), "values": len(self.seen[2].values)},
            EXIT_CHECK_FAILED if self.wrong else EXIT_OK,
            {"refused_pairs": refused},
            end=f"\nillegal pairs by what refuses them:\n{table}",
        )


main = Program(
    "combinations",
    __doc__,
    live,
    together=True,
    add=add_flags,
    json="write the outcome to this file",
).started(__name__)
