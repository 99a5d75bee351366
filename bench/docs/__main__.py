"""Writes the generated blocks of the pages, and says which pages are out of date.

    python -m bench.docs [PAGE...]              # write all pages, or these
    python -m bench.docs --check [PAGE...]      # write nothing; exit 1 if a page is out of date
    python -m bench.docs --no-run [PAGE...]     # leave the blocks alone whose commands take time
    python -m bench.docs measure FILE.json ['COMMAND' ...]

Blocks are explained in bench/docs/blocks.py, and each kind of block where it is written: commands,
measured, sources, tables, pictures.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from bench.docs import measured
from bench.docs.blocks import PageError
from bench.docs.commands import Workplace
from bench.docs.pages import ROOT, pages, read_page, write_page
from mpipar.errors import DataError, UserError

MOST_SHOWN, WIDEST = 20, 200  # lines of a difference, and characters of a line


def main(argv: list[str] | None = None) -> int:
    """Write or check pages, or measure; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["measure"]:
            if len(argv) == 1:
                raise DataError("measure: name a FILE.json, and the commands if it is new")
            measured.measure(Path(argv[1]), argv[2:])
            return 0
        parser = argparse.ArgumentParser(prog="python -m bench.docs", description=__doc__,
                                         formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("pages", nargs="*", type=Path, help="default: all")
        parser.add_argument("--check", action="store_true", help="write nothing")
        parser.add_argument("--no-run", action="store_true", help="run no command of a page")
        args = parser.parse_args(argv)
        chosen = [known_page(path) for path in args.pages] or pages()
        return go_through(chosen, check=args.check, run=not args.no_run)
    except (PageError, UserError) as error:
        print(error, file=sys.stderr)
        return 1


def known_page(path: Path) -> Path:
    """A page that the user names, as a path in the repository. Raises DataError."""
    whole = path.resolve()
    if whole.suffix != ".md" or not whole.is_relative_to(ROOT) or not whole.is_file():
        raise DataError(f"{path}: no such page; name README.md or a page of docs/")
    return whole.relative_to(ROOT)


def go_through(chosen: list[Path], *, check: bool, run: bool) -> int:
    """Write these pages and their pictures, or say which are out of date."""
    code = 0
    for page in chosen:
        text = read_page(page)
        workplace = Workplace(text) if run else None
        try:
            written = write_page(page, text, workplace)
        except PageError as error:
            print(error, file=sys.stderr)
            code = 1
            continue
        finally:
            if workplace:
                workplace.close()
        for path, text in written.items():
            before = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
            if text == before:
                continue
            if check:
                code = 1
                print(f"{path}: out of date; run python -m bench.docs {page}")
                print(difference(before, text))
            else:
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_text(text, encoding="utf-8")
                print(f"{path}: written")
    return code


def difference(before: str, after: str) -> str:
    """The first lines that differ."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new",
                                      lineterm="", n=0))
    return "\n".join(line[:WIDEST] for line in lines[:MOST_SHOWN])


if __name__ == "__main__":
    sys.exit(main())
