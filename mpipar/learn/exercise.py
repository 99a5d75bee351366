"""Defines exercises and answers, and judges numbers and words.

No answer is stored. Each exercise computes the truth from the code that a run would use.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpipar.errors import UsageError
from mpipar.files.text import brief, shown

PROGRAM = Path(__file__).parents[2]  # the folder that contains mpipar
MOST_DIGITS = 7  # after the decimal point
# A larger exponent would expand to an enormous number of digits.
NUMBER = re.compile(r"[+-]?(\d{1,9}/[1-9]\d{0,8}|\d{1,15}\.?\d{0,15}([eE][+-]?\d{1,2})?)", re.ASCII)

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)  # commas between thousands


def at_once(function: Callable):
    """Call a function directly: what `Session.agree` does for one process."""
    return function()


class Asked(NamedTuple):
    """What the reader typed, and where it runs.

    words: the answer. file: the reader's file. seed: selects a generated trace. world: the MPI
    communicator of several ranks, or None. agree: runs a function that may raise a user's error,
    and then ends all ranks together.
    """

    words: tuple[str, ...] = ()
    file: Path | None = None
    seed: int = 0
    world: object = None
    agree: Callable = at_once


class Verdict(NamedTuple):
    """Whether an answer is right, and lines that explain what was expected and why."""

    right: bool
    lines: list[str]


class Exercise(NamedTuple):
    """One exercise.

    id: number of its chapter, and a letter. task: what to find out, as sentences. answer: how it is
    typed after the id. judge(asked) -> Verdict; with several ranks the one of world rank 0 counts.
    show(asked) -> lines that belong to the task. ranks: numbers of ranks on which it runs; empty if
    it needs none. alone: whether one process can judge an answer too. original: the file of the
    program that the reader's file begins as a copy of. seeded: whether --seed selects its trace.
    """

    id: str
    task: str
    answer: str
    judge: Callable[[Asked], Verdict]
    show: Callable[[Asked], list[str]] | None = None
    ranks: tuple[int, ...] = ()
    alone: bool = True
    original: str = ""
    seeded: bool = False

    @property
    def chapter(self) -> int:
        return int(self.id[:-1])

    @property
    def takes_file(self) -> bool:
        return self.answer.startswith("--file")

    @property
    def command(self) -> str:
        """What a reader types to answer."""
        return f"{'' if self.alone else self.launcher}mpipar learn check {self.id} {self.answer}"

    def copying(self, file: str) -> str:
        """Return what a reader types to begin a file, wherever mpipar is installed."""
        return f"cp {shlex.quote(str(PROGRAM / self.original))} {shlex.quote(file)}"

    @property
    def launcher(self) -> str:
        """The launcher's part of the command, for its ranks."""
        return f"mpiexec -n {self.ranks[0]} "


class Number(NamedTuple):
    """A number that is asked for. within: how far an answer may be off."""

    name: str
    value: float
    within: float = 0.0


Truth = Callable[[], tuple[list[Number], str]]  # the expected numbers, and the explanation


def numbers(number: str, answer: str, task: str) -> Callable[[Truth], Exercise]:
    """Return a decorator: it makes an exercise of a function that returns numbers and the reason.

    answer: their names, in capitals.
    """

    def judge(truth: Truth, asked: Asked) -> Verdict:
        given = numbers_of(asked.words, answer)
        expected, why = truth()
        assert len(expected) == len(given), (number, answer)
        rows = [
            one_number(one, value, word)
            for one, value, word in zip(expected, given, asked.words, strict=True)
        ]
        return Verdict(
            all(right for right, _ in rows), [*(line for _, line in rows), f"why: {why}"]
        )

    return lambda truth: Exercise(number, task, answer, partial(judge, truth))


def one_number(expected: Number, given: Fraction, word: str) -> tuple[bool, str]:
    """Return (whether a number is right, a line that says so)."""
    off = abs(given - Fraction(expected.value))
    right = off <= Fraction(expected.within) + abs(Fraction(expected.value)) / 10**9
    digits = 1 - math.floor(math.log10(expected.within)) if expected.within else MOST_DIGITS
    return right, (
        f"{expected.name}: you say {brief(word)}, it is"
        f" {plain(expected.value, digits)} -> {'right' if right else 'WRONG'}"
    )


def plain(value: float, digits: int = MOST_DIGITS) -> str:
    """Return a number in plain decimal notation, with at most `digits` decimal places."""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{float(value):,.{digits}f}".rstrip("0").rstrip(".")


def numbers_of(words: tuple[str, ...], answer: str) -> list[Fraction]:
    """Return the numbers that the reader typed; UsageError says what to type instead."""
    names = answer.split()
    problems = (
        []
        if len(words) == len(names)
        else [
            (
                f"{len(words)} {'words' if len(words) != 1 else 'word'} given: type {len(names)},"
                f" {' '.join(names)}"
            )
        ]
    )
    found = []
    for word in words:
        try:
            found.append(number_of(word))
        except ValueError:
            problems.append(f"{shown(word)} is not a number such as 12, 8.3, 1/128 or 1e-3")
    if problems:
        raise UsageError(problems)
    return found


def number_of(word: str) -> Fraction:
    """Read 12, 1,024, 8.3 %, 1/128 or 1e-3; ValueError for anything else."""
    text = THOUSANDS.sub("", word).replace("%", "").strip()
    if not NUMBER.fullmatch(text):
        raise ValueError(word)
    return Fraction(text)


def words(number: str, choices: tuple[str, ...], task: str) -> Callable[[Callable], Exercise]:
    """Return a decorator: it makes an exercise of a function that returns a word and the reason."""

    def judge(truth: Callable, asked: Asked) -> Verdict:
        given = one_of(asked.words, choices)
        return said(given, *truth())

    return lambda truth: Exercise(number, task, "|".join(choices), partial(judge, truth))


def said(given: str, expected: str, why: str) -> Verdict:
    """Return the verdict on one word."""
    right = given == expected
    return Verdict(
        right,
        [f"you say {given}, it is {expected} -> {'right' if right else 'WRONG'}", f"why: {why}"],
    )


def one_of(given: tuple[str, ...], choices) -> str:
    """Return the one word of an answer. Raises UsageError."""
    if len(given) != 1 or given[0].lower() not in choices:
        raise UsageError(f"{shown(brief(' '.join(given)))}: type one of {', '.join(choices)}")
    return given[0].lower()
