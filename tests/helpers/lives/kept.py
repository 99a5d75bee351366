"""The covering arrays, stored in cases.json because finding them takes a minute.

    python -m tests.helpers.lives.kept

Run this after a change of the choices, or of what is legal together.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.helpers.lives.array import LETTERS, Case, case_of, described, pairs, row_of, singles
from tests.helpers.lives.choices import CHOICES, refusals, small_choices

FILE = Path(__file__).with_name("cases.json")
COMMAND = "python -m tests.helpers.lives.kept"


def text_of(part: Case) -> str:
    """Return some values of a case, as "zero=0 tp=2" with the letters of the values."""
    return " ".join(f"{name}={LETTERS[CHOICES[name].index(value)]}" for name, value in part.items())


def part_of(text: str) -> dict:
    """Return the values that `text_of` wrote."""
    return {
        name: CHOICES[name][LETTERS.index(letter)]
        for name, letter in (word.split("=") for word in text.split())
    }


def read() -> dict[str, list]:
    """Return the kept arrays.

    few: exact cases on at most two ranks, in which each value occurs. pairs: cases in which each
    legal pair of values occurs. illegal: all other pairs. Raises ValueError if
    the choices are no longer those that the arrays were made for.
    """
    kept = json.loads(FILE.read_text())
    if kept["choices"] != described(CHOICES):
        raise ValueError(f"{FILE}: made for other choices; run {COMMAND}")
    return {
        **{name: [case_of(row, CHOICES) for row in kept[name]] for name in ("few", "pairs")},
        "illegal": [part_of(part) for part in kept["illegal"]],
    }


def main() -> None:
    """Find the arrays and write them."""
    few = singles(small_choices(), partial(refusals, most_ranks=2))
    found, illegal = pairs(CHOICES, refusals)
    FILE.write_text(
        json.dumps(
            {
                "choices": described(CHOICES),
                "few": [row_of(case, CHOICES) for case in few],
                "pairs": [row_of(case, CHOICES) for case in found],
                "illegal": [text_of(part) for part in illegal],
            },
            indent=0,
        )
        + "\n"
    )
    print(f"{FILE.name}: {len(few)} and {len(found)} cases, {len(illegal)} illegal pairs")


if __name__ == "__main__":
    main()
