"""`tradeoff --pp P --num-microbatches M [--costs F,I,W]`: bubble against stash, by schedule."""

from __future__ import annotations

from fractions import Fraction

from bench.docs.pictures.drawing import CHARACTER, Drawing
from mpipar import cli
from mpipar.commands.schedule import cost_words, costs_of
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule, schedule_problems
from mpipar.pipeline.simulate import simulate

LEFT, TOP, WIDE, HIGH, ROW = 56, 76, 600, 330, 15


def points_of(p: int, m: int, costs) -> dict[tuple[float, float], list[str]]:
    """{(microbatches stashed on the fullest worker, bubble in percent): schedules}."""
    found: dict[tuple[float, float], list[str]] = {}
    for name in SCHEDULES:
        if schedule_problems(name, p, m, None):
            continue
        schedule = make_schedule(name, p, m)
        v = schedule.num_stages // p
        timeline = simulate(schedule, costs.divided(v))
        point = float(Fraction(max(timeline.peak_stash), v)), round(100 * timeline.bubble_share, 1)
        found.setdefault(point, []).append(name)
    return found


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    args = cli.context_of(None, "schedule", [*words, "--compare"]).args
    p, m, costs = args.pp, args.num_microbatches, costs_of(args)
    points = points_of(p, m, costs)
    stashes, bubbles = zip(*points, strict=True)
    most, worst = max(stashes), max(bubbles)
    canvas = Drawing(f"{p} workers, {m} microbatches: idle time against memory")
    canvas.text(0, 38, f"A worker's layers take {cost_words(costs)}.", "soft")
    canvas.line(LEFT, TOP + HIGH, LEFT + WIDE + 60, TOP + HIGH, "ink")
    canvas.line(LEFT, TOP, LEFT, TOP + HIGH, "ink")
    for number in range(0, int(most) + 1, max(1, round(most / 8))):
        canvas.text(LEFT + WIDE * number / most, TOP + HIGH + 18, str(number), "soft small",
                    "middle")
    for percent in range(0, int(worst) + 1, 10):
        canvas.text(LEFT - 8, TOP + HIGH * (1 - percent / worst) + 4, f"{percent} %", "soft small",
                    "end")
    canvas.text(LEFT + WIDE / 2, TOP + HIGH + 38, "microbatches stashed on the fullest worker",
                "soft", "middle")
    canvas.text(0, TOP - 12, "bubble: share of the step that workers idle", "soft")
    places = {point: (LEFT + WIDE * point[0] / most, TOP + HIGH * (1 - point[1] / worst))
              for point in points}
    taken = [(x - 7, x + 7, y) for x, y in places.values()]
    for (stash, bubble), names in sorted(points.items()):
        x, y = places[stash, bubble]
        canvas.circle(x, y, 5, "tp", f"{', '.join(names)}: bubble {bubble} %, stash {stash:g}")
        label(canvas, (x, y), ", ".join(names), taken)
    told = "; ".join(f"{', '.join(names)}: {bubble} % bubble, {stash:g} stashed"
                     for (stash, bubble), names in sorted(points.items()))
    alt = f"Bubble against stash on {p} workers with {m} microbatches. {told}"
    return canvas.svg("Bubble against stash", alt), alt


def label(canvas, point: tuple[float, float], words: str, taken: list) -> None:
    """Names beside a point: at the first place where nothing stands, the nearest ones first."""
    x, y = point
    width = CHARACTER * len(words)
    places = [(side, step * sign * ROW) for step in range(9) for sign in (-1, 1)
              for side in (x + 9, x - 9 - width)]
    left, shift = next(((side, shift) for side, shift in places
                        if is_free((side, side + width, y + shift), taken)), places[0])
    if shift:
        canvas.line(x, y, left + (0 if left > x else width), y + shift, "ink")
    near, anchor = (left, "start") if left > x else (x - 9, "end")
    canvas.text(near, y + 4 + shift, words, "small", anchor)
    taken.append((left, left + width, y + shift))


def is_free(span: tuple[float, float, float], taken: list) -> bool:
    """Whether nothing stands at (left, right, y) of the diagram."""
    left, right, y = span
    inside = left > LEFT and right < LEFT + WIDE + 90 and TOP - 6 < y < TOP + HIGH - 4
    return inside and all(abs(y - other) >= ROW - 1 or right < low or left > high
                          for low, high, other in taken)
