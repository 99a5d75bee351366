"""`range`: which numbers float32, bfloat16 and float16 can hold, on a scale of powers of two."""

from __future__ import annotations

from math import log2

import ml_dtypes
import numpy as np

from bench.docs.pictures.drawing import Drawing

LEFT, WIDE, TOP, ROW, HIGH = 84, 620, 86, 62, 26
LOW, TOPMOST = -150, 130  # powers of two
TYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def at(power: float) -> float:
    """The place of a power of two."""
    return LEFT + WIDE * (power - LOW) / (TOPMOST - LOW)


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    canvas, told = Drawing("The numbers that each type can hold, as powers of two", [
        ("r2", "full precision"), ("r1", "fewer and fewer digits (subnormal)"),
        ("idle", "becomes 0, or infinite")]), []
    for place, kind in enumerate(TYPES):
        info, y = ml_dtypes.finfo(kind), TOP + ROW * place
        small, normal, large = (log2(float(one)) for one in (
            info.smallest_subnormal, info.tiny, info.max))
        name = np.dtype(kind).name
        canvas.text(4, y + 17, name, "bold")
        canvas.rect(at(LOW), y, WIDE, HIGH, "idle")
        canvas.rect(at(small), y, at(normal) - at(small), HIGH, "r1")
        canvas.rect(at(normal), y, at(large) - at(normal), HIGH, "r2")
        step = f"next number after 1: 1 + 2^{round(log2(float(info.eps)))}"
        canvas.text(at(normal) + 6, y + 17, step if place < 2 else "", "small")
        canvas.text(LEFT, y + HIGH + 14, f"2^{small:.0f} to {float(info.max):.3g}"
                    + (f"; {step}" if place == 2 else ""), "soft small")
        told.append(f"{name}: 2^{small:.0f} to {float(info.max):.3g}, {step}")
    y = TOP + ROW * len(TYPES) + 2
    for power in range(-120, TOPMOST + 1, 40):
        canvas.text(at(power), y + 8, f"2^{power}", "soft small", "middle")
    alt = f"Ranges of three types of numbers. {'. '.join(told)}"
    return canvas.svg("Ranges of float32, bfloat16 and float16", alt), alt
