"""Writes the generated parts of the pages, reports those that are outdated, or measures for them.

python -m docs.build [PAGE...]              # write all pages, or these
python -m docs.build --check [PAGE...]      # write nothing; exit 1 if a page is out of date
python -m docs.build --no-run [PAGE...]     # leave the blocks alone whose commands take time
python -m docs.build measure FILE.json ['COMMAND' ...]
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from pathlib import Path

from docs.build import measured, pages
from docs.build.blocks import PageError
from docs.build.commands import Workplace
from mpipar.errors import DataError, UserError

MOST_SHOWN, WIDEST = 20, 200  # lines of a difference, and characters of a line


def main(argv: list[str] | None = None) -> int:
    """Write or check pages, or measure; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["measure"]:
            if len(argv) == 1:
                raise DataError("measure: name a FILE.json, and the commands if it is new")
            measured.measure(Path(argv[1]), argv[2:])
            return 0
        parser = argparse.ArgumentParser(
            prog="python -m docs.build",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("pages", nargs="*", type=Path, help="default: all")
        parser.add_argument("--check", action="store_true", help="write nothing")
        parser.add_argument("--no-run", action="store_true", help="run no command of a page")
        args = parser.parse_args(argv)
        chosen = [known_page(path) for path in args.pages] or pages.pages()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return max([write(page, check=args.check, run=not args.no_run) for page in chosen])


def known_page(path: Path) -> Path:
    """Return a page that the user names, as a path in the repository. Raises DataError."""
    whole = path.resolve()
    if whole.suffix != ".md" or not whole.is_relative_to(pages.ROOT) or not whole.is_file():
        raise DataError(f"{path}: no such page; name README.md or a page of docs/")
    return whole.relative_to(pages.ROOT)


def write(page: Path, *, check: bool, run: bool) -> int:
    """Write a page and its pictures, or report those that are out of date; return the exit code."""
    text = pages.read_page(page)
    try:
        with contextlib.closing(Workplace(text)) as workplace:
            written = pages.write_page(page, text, workplace if run else None)
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    code = 0
    for path, text in written.items():
        file = pages.ROOT / path
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if text == before or (check and before and path.suffix == ".svg"):
            continue  # another version of matplotlib draws another picture
        if check:
            code = 1
            print(f"{path}: out of date; run python -m docs.build {page}")
            lines = difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=0)
            print("\n".join(line[:WIDEST] for line in list(lines)[:MOST_SHOWN]))
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"{path}: written")
    return code


if __name__ == "__main__":
    sys.exit(main())
