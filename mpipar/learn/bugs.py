"""Find the bug: a planted twin differs from one rank, and the reader names its cause."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import partial

from mpipar.console.tables import table
from mpipar.learn import small_model
from mpipar.learn.exercise import Asked, Exercise, Verdict, one_of, said
from mpipar.learn.twins import GITHUB, TWINS, Twin, by_letter

MOST = 8  # tensors of a kind that are shown


def exercises() -> list[Exercise]:
    """Return one exercise per twin."""
    return [
        Exercise(
            number, task(number, twin), "LETTER", partial(judge, number), partial(show, twin), (2,)
        )
        for number, twin in TWINS.items()
    ]


def task(number: str, twin: Twin) -> str:
    """Return the task of the exercise."""
    ((axis, size),) = twin.layouts[0].items()
    return (
        f"A bug is planted in a step with {axis}={size} and the schedule {twin.schedule}."
        f" `mpiexec -n 2 mpipar learn check {number}` shows what differs from one rank, and"
        " twelve causes. Which cause is it?"
    )


def show(twin: Twin, asked: Asked) -> list[str]:
    """Return what one twin makes differ, and the causes to choose from."""
    causes = ["The twelve causes:"]
    causes += [f"  {letter}  {TWINS[number].cause}" for letter, number in by_letter().items()]
    if asked.world is None:
        return causes
    layout, lines = twin.layouts[0], []
    config = small_model.small_config(layout, schedule=twin.schedule)
    expected = small_model.expected_tensors(config, asked.world)
    with twin.plant():
        outcome = small_model.step_beside(config, asked.world, expected)
    if asked.world.rank == 0:
        lines = symptoms(outcome)
    return [*lines, "", *causes]


def symptoms(outcome: small_model.Outcome) -> list[str]:
    """Return what differs, by kind, and the largest differences."""
    wrong = Counter(one.kind for one in outcome.wrong)
    lines = []
    for kind, count in Counter(one.kind for one in outcome.differences).items():
        name = "loss and norm" if kind == "value" else f"{kind}s"
        lines.append(f"{name}: {wrong[kind] or 'none'} of {count} differ")
    shown = [
        one
        for kind in ("value", "gradient")
        for one in [one for one in outcome.wrong if one.kind == kind][:MOST]
    ]
    rows = [("tensor", "of the step", "difference", "at", "it is", "must be")]
    rows += [
        (
            one.name,
            one.kind,
            f"{one.error:.1e}",
            ",".join(map(str, one.where)),
            f"{one.actual:.6f}",
            f"{one.expected:.6f}",
        )
        for one in shown
    ]
    return [*lines, "", table(rows, left=2)]


def judge(number: str, asked: Asked) -> Verdict:
    """Return the verdict on an answer's letter, with the cause and how the bug is planted."""
    letters = by_letter()
    given = one_of(asked.words, letters)
    letter = next(one for one, twin in letters.items() if twin == number)
    twin = TWINS[number]
    verdict = said(given, letter, f"{twin.cause}. {twin.lesson}")
    planted = inspect.getsource(twin.plant).rstrip()
    threads = [f"published: {GITHUB}{thread}" for thread in twin.threads]
    return Verdict(
        verdict.right,
        [*verdict.lines, *threads, "as planted in mpipar/learn/twins.py:", "", planted],
    )
