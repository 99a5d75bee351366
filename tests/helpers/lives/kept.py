"""The covering arrays, stored in cases.json because finding them takes a minute.

    python -m tests.helpers.lives.kept

Run this after a change of the choices, or of what is legal together. A case is a row of letters,
one for each choice: the index of its value among the values of that choice.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tests.helpers.lives.array import pairs, singles
from tests.helpers.lives.choices import CHOICES, Case, small_choices

FILE = Path(__file__).with_name("cases.json")
LETTERS = string.digits + string.ascii_lowercase
COMMAND = "python -m tests.helpers.lives.kept"


def described() -> dict[str, str]:
    """Return {name: values in words}: what the letters stand for."""
    return {name: ", ".join(map(repr, values)) for name, values in CHOICES.items()}


def row_of(case: Case) -> str:
    """Return a whole case as letters."""
    return "".join(LETTERS[values.index(case[name])] for name, values in CHOICES.items())


def case_of(row: str) -> dict:
    """Return the case of a row of letters."""
    return {
        name: values[LETTERS.index(letter)]
        for letter, (name, values) in zip(row, CHOICES.items(), strict=True)
    }


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
    legal pair of values occurs. illegal: (pair of values, what refuses it). Raises ValueError if
    the choices are no longer those that the arrays were made for.
    """
    kept = json.loads(FILE.read_text())
    if kept["choices"] != described():
        raise ValueError(f"{FILE}: made for other choices; run {COMMAND}")
    return {
        "few": list(map(case_of, kept["few"])),
        "pairs": list(map(case_of, kept["pairs"])),
        "illegal": [(part_of(part), why) for part, why in kept["illegal"].items()],
    }


def main() -> None:
    """Find the arrays and write them."""
    few = singles(small_choices(), 2)
    found, illegal = pairs()
    FILE.write_text(
        json.dumps(
            {
                "choices": described(),
                "few": list(map(row_of, few)),
                "pairs": list(map(row_of, found)),
                "illegal": {text_of(part): why for part, why in illegal},
            },
            indent=0,
        )
        + "\n"
    )
    print(f"{FILE.name}: {len(few)} and {len(found)} cases, {len(illegal)} illegal pairs")


if __name__ == "__main__":
    main()
