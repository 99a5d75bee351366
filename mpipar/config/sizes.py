"""Sizes in bytes as people type them."""

import re
from fractions import Fraction

SIZE = re.compile(
    r"(\d{1,19}|\d{1,19}\.\d{1,19}(?=[KMGT]))(?:([KMGT])i?)?B?", re.IGNORECASE | re.ASCII
)
POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def read_bytes(text: str) -> int:
    """Return 4096, 64K, 1.5M, 20MiB or 1G (powers of 1024) in bytes; else raise ValueError."""
    found = SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError("must be bytes: write 4096, 64K, 1.5M or 1G")
    return round(Fraction(found[1]) * (1 << POWERS[(found[2] or "").upper()]))
