"""Writes the generated parts of the pages, or measures for them.

python -m docs.build [PAGE...]              # write all pages, or these
python -m docs.build --no-run [PAGE...]     # leave the blocks alone whose commands take time
python -m docs.build measure FILE.json ['COMMAND' ...]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from bench.results import ROOT
from docs.build import commands, pictures, tables
from docs.build.blocks import Block, PageError, update
from mpipar.errors import DataError, UserError

# What writes a block of each kind: (block, root of the repository) -> text.
WRITERS = {
    "measured": commands.shown_measured,
    "code": tables.listing,
    "result": tables.result,
    "table": tables.table,
}


def main(argv: list[str]) -> int:
    """Write pages, or measure; return the exit code."""
    try:
        if argv[:1] == ["measure"]:
            if len(argv) == 1:
                raise DataError("measure: name a FILE.json, and the commands if it is new")
            commands.measure(Path(argv[1]), argv[2:])
            return 0
        parser = argparse.ArgumentParser(
            prog="python -m docs.build",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("pages", nargs="*", type=Path, help="default: all")
        parser.add_argument("--no-run", action="store_true", help="run no command of a page")
        args = parser.parse_args(argv)
        for page in [path.resolve().relative_to(ROOT) for path in args.pages] or all_pages():
            write(page, run=not args.no_run)
    except (UserError, PageError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def write(page: Path, *, run: bool) -> None:
    """Write a page and its pictures where they are out of date. Raises PageError."""
    text = read_page(page)
    with contextlib.closing(commands.Workplace(text)) as workplace:
        written = write_page(page, text, workplace if run else None)
    for path, text in written.items():
        file = ROOT / path
        if not file.exists() or text != file.read_text(encoding="utf-8"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"{path}: written")


def all_pages() -> list[Path]:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
