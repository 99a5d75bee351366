"""The covering arrays, stored in cases.json because finding them takes ten seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.helpers.lives.array import first_of, pairs, read_for, row_of, singles, write
from tests.helpers.lives.choices import CHOICES, refusals, small_choices

FILE = Path(__file__).with_name("cases.json")


def read() -> dict[str, list]:
    """Return the kept arrays.

    few: exact cases on at most two ranks, in which each value occurs. pairs: cases in which each
    legal pair of values occurs. illegal: all other pairs. Raises ValueError if
    the choices are no longer those that the arrays were made for.
    """
    arrays, first = read_for(FILE, CHOICES), first_of(CHOICES)
    return {
        **{name: [first | row for row in arrays[name]] for name in ("few", "pairs")},
        "illegal": arrays["illegal"],
    }


def find() -> None:
    """Find the arrays and write them."""
    few = singles(small_choices(), partial(refusals, most_ranks=2))
    found, illegal = pairs(CHOICES, refusals)
    write(
        FILE,
        CHOICES,
        {
            "few": [row_of(case, CHOICES) for case in few],
            "pairs": [row_of(case, CHOICES) for case in found],
            "illegal": illegal,
        },
    )
    print(f"{FILE.name}: {len(few)} and {len(found)} cases, {len(illegal)} illegal pairs")
