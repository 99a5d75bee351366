"""The kept cases of lives, where no setting and no legal pair is left out, and of the law."""

from functools import partial

import drawn
import numpy as np

from mpipar.config.sections import FIELDS
from tests.helpers.lives import kept
from tests.helpers.lives.array import Completion, Coverage, row_of
from tests.helpers.lives.choices import (
    BASE,
    BASE_OF,
    CHOICES,
    OUTSIDE,
    refusals,
    small_choices,
)


def test_each_setting_is_a_choice_or_stands_outside_with_its_reason():
    """A new flag must join one of the lists: else no life has it."""
    base = {*BASE, *(name for settings in BASE_OF.values() for name in settings)}
    assert FIELDS.keys() == {*CHOICES, *base, *OUTSIDE}


def test_the_kept_arrays_hold_each_value_and_each_pair():
    """What the ranks of the sessions live. A choice or value that is new asks for a new array."""
    arrays = kept.read()
    assert all(not refusals(case) for case in arrays["pairs"])
    assert all(not refusals(case, 2) and case["dtype"] == "float64" for case in arrays["few"])
    coverage = Coverage(CHOICES)
    illegal = np.zeros_like(coverage.seen)
    for case in arrays["pairs"]:
        coverage.add(case)
    for part in arrays["illegal"]:
        illegal[tuple(coverage.places(part))] = True
    assert (coverage.seen | illegal)[coverage.different()].all()
    assert not (coverage.seen & illegal).any()
    completion = Completion(small_choices(), partial(refusals, most_ranks=2))
    for name, values in small_choices().items():
        lived = {case[name] for case in arrays["few"]}
        legal = {value for value in values if completion.of({name: value})}
        assert lived == legal, name


def test_cases_of_a_new_value_are_added_to_those_of_the_law():
    """As if the cut by input were new, and another value had been first: all other cases stay."""
    before = {**drawn.CHOICES, "ffn_cut": ("gather", None)}
    kept = [case for case in drawn.cases(2) if case["ffn_cut"] != "reduce"]
    rows = [row_of(case, drawn.choices_of(2) | before) for case in kept]
    found = drawn.extended(2, before, rows)
    assert found[drawn.MORE :] == kept
    added = found[: drawn.MORE]
    assert all(case["ffn_cut"] == "reduce" and not drawn.refusals(case) for case in added)
    assert len(set(map(drawn.text_of, added))) == drawn.MORE
