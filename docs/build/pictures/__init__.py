"""Pictures of the pages, drawn from real schedules, shapes and result files."""

from __future__ import annotations

from pathlib import Path

from docs.build.blocks import Block
from docs.build.pictures import boxes, lanes, plots
from mpipar.errors import UserError

FOLDER = Path("docs/pictures")
# Each draws what its words and the root of the repository say: (SVG, its alt text).
KINDS = {
    "timeline": lanes.timeline,
    "blocks": boxes.blocks,
    "ring": boxes.ring,
    "grid": boxes.grid,
    "memory": plots.memory,
    "tradeoff": plots.tradeoff,
    "barrier": lanes.barrier,
    "roofline": plots.roofline,
    "predicted": lanes.predicted,
    "chain": boxes.chain,
    "buckets": lanes.buckets,
    "range": lanes.ranges,
    "bars": lanes.bars,
    "tokens": lanes.tokens,
    "rows": lanes.rows,
}


def draw(block: Block, root: Path) -> tuple[Path, str, str]:
    """Return (path in the repository, SVG, the line of the page) of `picture: NAME KIND ARGUMENTS`.

    Raises PageError.
    """
    name, kind, *words = [*block.words.split(), ""]
    if kind not in KINDS:
        raise block.problem(f"use a name and one of the kinds {', '.join(KINDS)}")
    try:
        picture, alt = KINDS[kind](words[:-1], root)
    except (UserError, OSError, KeyError, ValueError) as error:
        raise block.problem(f"{type(error).__name__}: {error}") from error
    up = "../" * (len(block.page.parent.parts) - 1) if block.page.parent.parts else "docs/"
    return FOLDER / f"{name}.svg", picture, f"![{alt}]({up}pictures/{name}.svg)"
