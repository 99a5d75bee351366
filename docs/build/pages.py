"""The list of pages, and the writer of each kind of generated block."""

from __future__ import annotations

from pathlib import Path

from bench.results import ROOT
from docs.build import commands, measured, pictures, tables
from docs.build.blocks import Block, update

# What writes a block of each kind: (block, root of the repository) -> text.
WRITERS = {
    "measured": measured.shown,
    "code": tables.listing,
    "result": tables.result,
    "table": tables.table,
}


def pages() -> list[Path]:
    """Return README.md and the pages of docs/, as paths in the repository."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [Path("README.md"), *(path.relative_to(ROOT) for path in found)]


def read_page(page: Path) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def write_page(page: Path, text: str, workplace: commands.Workplace | None) -> dict[Path, str]:
    """Return {path in the repository: text} of a page and its pictures. Raises PageError.

    workplace: where the commands of `run` blocks run; without one these blocks stay as they are.
    """
    drawn = {}

    def run(block: Block, root: Path) -> str:
        return block.body if workplace is None else commands.shown(block, workplace)

    def picture(block: Block, root: Path) -> str:
        path, drawn[path], line = pictures.draw(block)
        return line

    writers = {"run": run, "picture": picture, **WRITERS}

    def write(block: Block) -> str:
        if block.kind not in writers:
            raise block.problem(f"unknown kind of block; use {', '.join(writers)}")
        return writers[block.kind](block, ROOT)

    return {page: update(page, text, write), **drawn}
