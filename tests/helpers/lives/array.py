"""Covering arrays: lists of legal cases in which each legal pair of values occurs.

choices: {name: values}. mpipar itself decides whether values are legal together: refusals(case)
are its objections to a whole case. An incomplete case is legal if some whole case with its values
is. `Completion` looks for one. Where mpipar refuses a case, it tries other values of the free
choices, and keeps those that get past the first refusal.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

Case = Mapping[str, object]
Refusals = Callable[[Case], list[str]]
COMMAND = "PYTHONPATH=. python tests/helpers/new_cases.py"  # writes the files

DEEPEST = 6  # refusals that are overcome one after the other
NEAR = 3  # known cases from which the search for a pair of values starts
LOOKS = 1  # attempts with a choice that never overcomes a kind of refusal


class Completion:
    """Finds whole legal cases, and learns from mpipar's refusals to become faster."""

    def __init__(self, choices: Mapping, refusals: Refusals):
        self.choices, self.refusals = choices, refusals
        # Kind of refusal -> how often another value of a choice overcame it, and how often it was
        # tried.
        self.matters: dict = defaultdict(Counter)
        self.tries: dict = defaultdict(Counter)

    def of(self, part: Case, near: Case | None = None) -> dict | None:
        """Return a whole legal case with these values, or None. near: a case to begin with."""
        first = {name: values[0] for name, values in self.choices.items()}
        return self._mended({**first, **(near or {}), **part}, frozenset(part), DEEPEST)

    def _mended(self, case, fixed, depth):
        wrong = self.refusals(case)
        if not wrong:
            return case
        kind = kind_of(wrong[0])
        if not depth:
            return None
        matters, tries = self.matters[kind], self.tries[kind]
        for name in sorted(self.choices.keys() - fixed, key=lambda name: (-matters[name], name)):
            if not matters[name] and tries[name] >= LOOKS:
                continue
            tries[name] += 1
            for value in self.choices[name]:
                other = {**case, name: value}
                if value == case[name] or kind in map(kind_of, self.refusals(other)):
                    continue
                matters[name] += 1
                if found := self._mended(other, fixed | {name}, depth - 1):
                    return found
        return None


def kind_of(refusal: str) -> str:
    """Return what a refusal is about, without its values: the flag at its start, and its rule."""
    flag, _, rule = refusal.partition(": ")
    return " ".join([flag.split()[0], *re.findall("[a-z]{3,}", rule or flag)[:6]])


class Coverage:
    """Which pairs of values of different choices occur in cases. values: all (name, value)."""

    def __init__(self, choices: Mapping):
        self.choices = choices
        self.values = [(name, value) for name, values in choices.items() for value in values]
        self.place = {value: number for number, value in enumerate(self.values)}
        self.seen = np.zeros((len(self.values),) * 2, bool)

    def places(self, case: Case) -> list[int]:
        """Return the numbers of a case's values, ascending."""
        return [self.place[name, case[name]] for name in self.choices if name in case]

    def add(self, case: Case) -> None:
        """Note that a case's pairs occur."""
        self.seen[np.ix_(*[self.places(case)] * 2)] = True

    def gain(self, case: Case, name: str, value) -> int:
        """Return how many new pairs a value brings to a case that lacks its choice."""
        return int((~self.seen[self.place[name, value]][self.places(case)]).sum())

    def different(self) -> np.ndarray:
        """Return where `seen` is of a pair: its values ascend and are of different choices."""
        choice = np.array([list(self.choices).index(name) for name, _ in self.values])
        return choice[:, None] < choice

    def part(self, places) -> dict:
        """Return the values with these numbers."""
        return dict(self.values[place] for place in places)


def filled(
    part: Case, coverage: Coverage, completion: Completion, order, near: Case | None = None
) -> dict | None:
    """Return a whole legal case with these values, adding the most new pairs choice by choice.

    near: see `Completion.of`.
    """
    whole = completion.of(part, near)
    if whole is None:
        return None
    case = dict(part)
    for name in order:
        if name in case:
            continue
        for value in sorted(
            coverage.choices[name], reverse=True, key=lambda value: coverage.gain(case, name, value)
        ):
            found = whole if whole[name] == value else completion.of({**case, name: value}, whole)
            if found:
                case[name], whole = value, found
                break
    return {name: case[name] for name in coverage.choices}


def singles(choices: Mapping, refusals: Refusals) -> list[dict]:
    """Return a few cases in which each legal value occurs, and many pairs."""
    completion, coverage = Completion(choices, refusals), Coverage(choices)
    rng, cases = np.random.default_rng(0), []
    for name, value in coverage.values:
        if any(case[name] == value for case in cases):
            continue
        if case := filled({name: value}, coverage, completion, rng.permutation(list(choices))):
            cases.append(case)
            coverage.add(case)
    return cases


def pairs(
    choices: Mapping,
    refusals: Refusals,
    known: Collection[Case] = (),
    new: Collection[tuple] | None = None,
    most: int | None = None,
) -> tuple[list[dict], list[dict]]:
    """Return cases in which each legal pair of values occurs, and all illegal pairs.

    Each case begins with the pair whose values lack most pairs. known: cases that there are, whose
    pairs are not sought. new: only pairs with one of these (name, value) are. most: the number of
    cases after which the search ends.
    """
    completion, coverage = Completion(choices, refusals), Coverage(choices)
    rng, cases, illegal, open_ = np.random.default_rng(0), [], [], coverage.different()
    for case in known:
        coverage.add(case)
    if new is not None:
        with_new = np.array([value in new for value in coverage.values])
        open_ &= with_new[:, None] | with_new
    while len(cases) != most and len(left := np.argwhere(open_ & ~coverage.seen)):
        lacks = np.bincount(left.ravel(), minlength=len(coverage.values))
        places = left[lacks[left].sum(1).argmax()]
        part = coverage.part(places)
        near = [None, *(one for one in (*cases, *known) if part.items() & one.items())][: NEAR + 1]
        order = rng.permutation(list(choices))
        tried = (filled(part, coverage, completion, order, one) for one in near)
        if case := next(filter(None, tried), None):
            cases.append(case)
            coverage.add(case)
        else:
            open_[tuple(places)] = False
            illegal.append(part)
    return cases, [part for part in illegal if not coverage.seen[*coverage.places(part)]]


# --- arrays in a file: of a whole case, a row has the values that are not the first of a choice


def first_of(choices: Mapping) -> dict:
    """Return the case of first values; with those of a row, it is that of the row."""
    return {name: values[0] for name, values in choices.items()}


def row_of(case: Case, choices: Mapping) -> dict:
    """Return what is not at its first value."""
    return {name: value for name, value in case.items() if value != choices[name][0]}


def write(path: Path, choices: Mapping, arrays: Mapping[str, list]) -> None:
    """Write the choices, and arrays of rows or of parts of cases, as JSON with a row on a line."""
    lists = {"choices": [list(choice) for choice in choices.items()], **arrays}
    path.write_text(
        "{\n"
        + ",\n".join(
            f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]"
            for name, rows in lists.items()
        )
        + "\n}\n"
    )


def read(path: Path) -> tuple[dict, dict]:
    """Return (choices, arrays) that `write` wrote."""
    arrays = frozen(json.loads(path.read_text()))
    return dict(arrays.pop("choices")), arrays


def read_for(path: Path, choices: Mapping) -> dict:
    """Return the arrays of a file; ValueError unless they are of these choices."""
    known, arrays = read(path)
    if known != choices:
        raise ValueError(f"{path.name} is for other choices: type {COMMAND}")
    return arrays


def frozen(x):
    """Return what JSON holds with tuples for lists, which JSON also makes of tuples."""
    if isinstance(x, dict):
        return {name: frozen(value) for name, value in x.items()}
    return tuple(map(frozen, x)) if isinstance(x, list) else x
