"""Layouts in words, for the tables of bench.claims."""

from __future__ import annotations


def layout_name(layout: dict) -> str:
    """The axes with their sizes, as in "pp 2 x dp 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())
