"""`roofline FILE`: the rungs of the product ladder under the two roofs of this machine.

The slanted roof is memory: bytes per second times FLOPs per byte. The flat one is BLAS.
"""

from __future__ import annotations

from math import log10

from bench.docs.pictures.drawing import CHARACTER, Drawing
from bench.docs.pictures.files import load, machine_words

LEFT, TOP, WIDE, HIGH = 64, 66, 620, 320


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    found = load(root, words, "bench.tiles")
    rows, machine = found["rows"], found["machine"]
    peak, memory = machine["blas_gflops"], machine["copy_gbs"]
    low_x = min(0.1, *(row["flop_per_byte"] / 2 for row in rows))
    high_x = max(2 * peak / memory, *(2 * row["flop_per_byte"] for row in rows))
    high_y, low_y = 2 * peak, min(low_x * memory, *(row["gflops"] for row in rows)) / 2

    def at(intensity: float, speed: float) -> tuple[float, float]:
        x = log10(intensity / low_x) / log10(high_x / low_x)
        y = log10(speed / low_y) / log10(high_y / low_y)
        return LEFT + WIDE * x, TOP + HIGH * (1 - y)

    canvas = Drawing("The product ladder under the roofs of this machine")
    canvas.text(0, 38, machine_words(found), "soft small")
    canvas.line(LEFT, TOP + HIGH, LEFT + WIDE, TOP + HIGH, "ink")
    canvas.line(LEFT, TOP, LEFT, TOP + HIGH, "ink")
    for power in range(-3, 5):
        value = 10.0**power
        if low_x <= value <= high_x:
            canvas.text(at(value, low_y)[0], TOP + HIGH + 18, f"{value:g}", "soft small", "middle")
        if low_y <= value <= high_y:
            canvas.text(LEFT - 8, at(low_x, value)[1] + 4, f"{value:g}", "soft small", "end")
    canvas.text(LEFT + WIDE / 2, TOP + HIGH + 38, "FLOPs for each byte that memory delivers",
                "soft", "middle")
    canvas.text(LEFT + 8, TOP + 2, "GFLOP/s", "soft")
    ridge = peak / memory
    canvas.line(*at(low_x, low_x * memory), *at(ridge, peak), "tp", width=2.5)
    canvas.line(*at(ridge, peak), *at(high_x, peak), "dp", width=2.5)
    x, y = at(ridge, peak)
    canvas.text(x + 6, y - 8, f"BLAS {peak:.0f} GFLOP/s", "small")
    x, y = at(ridge / 4, ridge / 4 * memory)
    canvas.text(x - 8, y - 2, f"memory {memory:.1f} GB/s", "small", "end")
    for row in rows:
        x, y = at(row["flop_per_byte"], row["gflops"])
        words = f"{row['product']}: {row['percent_of_blas']:.3g} % of BLAS"
        canvas.circle(x, y, 5, "wait", words)
        left = x + 9 + CHARACTER * len(words) > LEFT + WIDE
        below = 20 if row["gflops"] > 0.8 * peak else 4  # clear of the roof
        canvas.text(x - 9 if left else x + 9, y + below, words, "small",
                    "end" if left else "start")
    told = "; ".join(f"{row['product']} {row['gflops']:.3g} GFLOP/s" for row in rows)
    alt = f"Roofline: memory gives {memory:.1f} GB/s, BLAS {peak:.0f} GFLOP/s. {told}"
    return canvas.svg("Roofline of the product ladder", alt), alt
