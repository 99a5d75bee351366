"""The pages, and how each kind of block in them is written."""

from __future__ import annotations

from pathlib import Path

from bench.docs import commands, measured, pictures, sources, tables
from bench.docs.blocks import Block, update
from bench.results import ROOT

WRITERS = {"measured": measured.shown, "code": sources.listing, "result": tables.result,
           "table": tables.table, "map": tables.file_map, "exercise": tables.exercises}


def pages() -> list[Path]:
    """README.md and the pages of docs/, as paths in the repository."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [Path("README.md"), *(path.relative_to(ROOT) for path in found)]


def read_page(page: Path) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def write_page(page: Path, text: str, workplace: commands.Workplace | None) -> dict[Path, str]:
    """{path in the repository: text} of a page and its pictures. Raises PageError.

    workplace: where the commands of `run` blocks run; without one these blocks stay as they are.
    """
    drawn = {}

    def write(block: Block, body: str) -> str:
        if block.kind == "run":
            return body if workplace is None else commands.shown(block, workplace)
        if block.kind == "picture":
            path, picture, line = pictures.draw(block, ROOT)
            drawn[path] = picture
            return line
        if block.kind not in WRITERS:
            kinds = ", ".join(("run", "picture", *WRITERS))
            raise block.problem(f"no block is of this kind; use {kinds}")
        return WRITERS[block.kind](block, ROOT)

    return {page: update(page, text, write), **drawn}
