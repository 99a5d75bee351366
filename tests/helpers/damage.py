"""Damages files at random, as a disk, a stopped program or an attacker would."""

import random
import re

NUMBERS = (
    b"-1",
    b"0",
    b"7",
    b"1e308",
    b"NaN",
    b"Infinity",
    b"9" * 18,
    b"9" * 25,
    b"9" * 5000,
    b"true",
    b"null",
    b'"x"',
    b"[]",
    b"{}",
    b"2.5",
    b"-9999999999",
)
TEXTS = (
    b'"\\u001b[31m"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"<!--<script>"',
    b'"' + b"k" * 999 + b'"',
    b'""',
    b'"1"',
    b"3",
)


def flip(path, share=0.5):
    """Change one bit at this share of a file's length: the lowest of the first of two bytes."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1)) & ~1] ^= 1
    path.write_bytes(content)


def damaged(content: bytes, seed: int) -> bytes:
    """The content with one to three changes; the seed chooses them."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = chance.choice(CHANGES)(content, chance)
    return content


def _place(content, chance):
    return chance.randrange(len(content) + 1)


def _cut(content, chance):
    return content[: _place(content, chance)]


def _without(content, chance):
    at = _place(content, chance)
    return content[:at] + content[at + chance.choice((1, 2, 40, 4000)) :]


def _twice(content, chance):
    at, length = _place(content, chance), chance.choice((1, 20, 300))
    return content[:at] + content[at - length : at] + content[at:]


def _other_byte(content, chance):
    at = _place(content, chance)
    return content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]


def _inserted(content, chance):
    at = _place(content, chance)
    return (
        content[:at]
        + chance.choice(
            (
                b"[" * 5000,
                b"{",
                b"}",
                b",",
                b'"',
                b"\0",
                b"\n",
                b"\xff",
                b"9" * 5000,
                b"-",
                b"\x1b[2J",
            )
        )
        + content[at:]
    )


def _swapped(content, chance, pattern, others):
    """One thing that the pattern finds, replaced by another."""
    found = list(re.finditer(pattern, content[:200_000]))
    if not found:
        return content
    one = chance.choice(found)
    return content[: one.start()] + chance.choice(others) + content[one.end() :]


def _number(content, chance):
    return _swapped(content, chance, rb"-?\d+(\.\d+)?(e-?\d+)?", NUMBERS)


def _text(content, chance):
    return _swapped(content, chance, rb'"[^"\n]*"', TEXTS)


def _line_moved(content, chance):
    lines = content.split(b"\n")
    line = lines.pop(chance.randrange(len(lines)))
    lines.insert(chance.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


CHANGES = (
    _cut,
    _without,
    _twice,
    _other_byte,
    _inserted,
    _number,
    _number,
    _number,
    _text,
    _line_moved,
)
