"""Exercises on who waits for whom: traces with a planted cause, generated when asked for.

--seed selects another trace. The truth is drawn from it, so nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple

from mpipar.console.tables import table
from mpipar.errors import UsageError
from mpipar.files.text import shown
from mpipar.learn.exercise import Asked, Exercise, Number, Verdict, numbers, one_of, said
from mpipar.trace.analysis import CATEGORIES, Analysis, analyse, barrier_rows, rank_rows
from mpipar.trace.planted_delays import Run, Simulator, record
from mpipar.trace.timeline import median_step, timeline
from mpipar.trace.waits import Call

WIDTH = 100  # characters of a timeline
BARRIERS = 6  # rows of the table of barriers
LAYOUTS = ((("dp", 2),), (("tp", 2),), (("pp", 2),), (("dp", 2), ("pp", 2)))
CAUSES = {"data": "data", "forward": "F", "backward": "B", "optimizer": "opt", "gc": "gc"}
SHAPES = {  # what can be wrong with a run of four pipeline ranks
    "uneven": {"stage_layers": (2, 1, 1, 0)},
    "head": {"vocab_size": 1500},
    "link": {"fault": "link"},
    "schedule": {"schedule": "naive", "microbatches": 8},
    "nothing": {},
}
ARRIVALS, DONE = (10.0, 14.0, 11.0), 16.0  # ms


class Planted(NamedTuple):
    """A generated trace and the words that are true of it."""

    analysis: Analysis
    truth: tuple[str, ...]


def exercises() -> list[Exercise]:
    """Return all exercises of this kind."""
    causes = "|".join(CAUSES)
    return [
        Exercise(
            "11a",
            "One rank of a run is late in every step, and others wait for it."
            " `mpipar learn check 11a` prints a trace. Which rank is late, and what takes it"
            " too long? With `--seed N` you get another trace.",
            f"RANK {causes}",
            partial(judge, late_rank, late_answer),
            partial(show, late_rank),
            seeded=True,
        ),
        waits_of_three,
        Exercise(
            "11c",
            "Four pipeline ranks run a step, and `mpipar learn check 11c` prints a"
            " trace. What is wrong: uneven stages, a heavy head, a slow link, the schedule, or"
            " nothing? With `--seed N` you get another trace.",
            "|".join(SHAPES),
            partial(judge, pipeline_run, lambda words, _: (one_of(words, SHAPES),)),
            partial(show, pipeline_run),
            seeded=True,
        ),
    ]


def late_rank(seed: int) -> Planted:
    """Return a run in which one rank loses half a step each time."""
    random = Random(seed)  # noqa: S311 (nothing is secret)
    cause = random.choice(sorted(CAUSES))
    plain = Run(random.choice(LAYOUTS), seed=seed)
    healthy = Simulator(plain)
    late = random.randrange(len(healthy.ranks))
    run = replace(plain, fault=CAUSES[cause], rank=late, delay=healthy.step_ms / 2)
    return Planted(analyse(Simulator(run).trace), (str(late), cause))


def pipeline_run(seed: int) -> Planted:
    """Return a run of four pipeline ranks with one of SHAPES."""
    random = Random(seed)  # noqa: S311 (nothing is secret)
    shape = random.choice(sorted(SHAPES))
    run = replace(Run((("pp", 4),), microbatches=8, seed=seed), **SHAPES[shape])
    if shape == "link":
        sender = random.choice((0, 1, 2))
        run = replace(
            run, link=("pp", (sender, sender + 1)), delay=Simulator(run.without()).step_ms
        )
    return Planted(analyse(Simulator(run).trace), (shape,))


def show(make: Callable[[int], Planted], asked: Asked) -> list[str]:
    """Return the trace, without what `mpipar trace` concludes from it."""
    analysis = make(asked.seed).analysis
    trace = analysis.trace
    step, window = median_step(trace)
    rows = [("rank", "place", "stages", *CATEGORIES)]
    rows += [
        (one["rank"], one["place"], "; ".join(one["stages"]), *(f"{ms:.1f}" for ms in one["ms"]))
        for one in rank_rows(analysis)
    ]
    meetings = [("axis", "barrier", "wait ms", "transfer ms", "mostly waited for")]
    meetings += [
        (
            one["axis"],
            one["name"],
            f"{one['wait_ms']:.2f}",
            f"{one['transfer_ms']:.2f}",
            f"rank {one['last']}" if one["times"] else "",
        )
        for one in barrier_rows(analysis)[:BARRIERS]
    ]
    return [
        f"step {step} of {trace.num_steps}:",
        timeline(trace, analysis.segments, WIDTH, window),
        "",
        "where the time went, ms per step:",
        table(rows, left=3),
        "",
        "barriers, ms per step, summed over ranks:",
        table(meetings, left=2),
    ]


def judge(make: Callable[[int], Planted], read: Callable, asked: Asked) -> Verdict:
    """Return the verdict on a trace. read(words, Planted): the answer, in the truth's form."""
    planted = make(asked.seed)
    given = read(asked.words, planted)
    findings = [f"{one.kind}: {one.text}" for one in planted.analysis.findings]
    return said(
        " ".join(given),
        " ".join(planted.truth),
        "`mpipar trace` says of it: "
        + ("; ".join(findings) or "no finding, all ranks are equally busy"),
    )


def late_answer(words: tuple[str, ...], planted: Planted) -> tuple[str, ...]:
    """Return a rank and a cause. Raises UsageError that lists all mistakes."""
    if len(words) != 2:
        raise UsageError(f"{len(words)} words given: type a rank and a cause, as in 0 data")
    last = len(planted.analysis.trace.ranks) - 1
    problems = []
    if not (words[0].isdecimal() and len(words[0]) < 4 and int(words[0]) <= last):
        problems.append(f"{shown(words[0])}: not a rank of this trace; type 0 to {last}")
    if words[1].lower() not in CAUSES:
        problems.append(f"{shown(words[1])}: not a cause; type one of {', '.join(CAUSES)}")
    if problems:
        raise UsageError(problems)
    return str(int(words[0])), words[1].lower()


@numbers(
    "11b",
    "RANK_0 RANK_1 RANK_2",
    "Three ranks come to an all-reduce at 10, 14 and 11 ms. All"
    " leave it at 16 ms. How many ms does each of them wait for a late rank? The rest of its"
    " time there is transfer.",
)
def waits_of_three():
    """Split times as `mpipar trace` does."""
    late = max(range(3), key=ARRIVALS.__getitem__)
    found = []
    for index, came in enumerate(ARRIVALS):
        call = Call(index, record("all_reduce", "step.norm", "world", came, came, DONE))
        if index != late:
            call.set_wait(round(ARRIVALS[late] * 1e6), late)
        found.append(Number(f"rank {index}", call.wait_ns * 1e-6, 0.001))
    return found, (
        f"rank {late} comes last, at {ARRIVALS[late]:g} ms. The others wait until then,"
        f" and from then to {DONE:g} ms all three transfer"
    )
