"""The documentation as a site, with an API page for each folder of the core.

    pip install -e '.[docs]'
    python -m docs.build.site build/site

It builds the pages from their current text, without network or MPI. Any Sphinx warning fails the
build with exit code 1. The file to open is index.html.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "mpipar"
CORE = ("ops", "comm", "layers", "models", "pipeline", "train")  # what a library needs
SETTINGS = {
    "project": "mpipar",
    "html_title": "mpipar",
    "author": "The mpipar authors",
    "copyright": "The mpipar authors, Apache-2.0",
    "extensions": ["myst_parser", "sphinx.ext.autodoc"],
    "html_theme": "furo",
    "exclude_patterns": ["build", "examples"],
    "myst_heading_anchors": 4,
    "autodoc_member_order": "bysource",
    "autodoc_default_options": {"members": True, "undoc-members": True},
    "autodoc_mock_imports": [
        "numba"
    ],  # the extra docs alone is enough: compiled loops stand as written
    # A fence may name a language that Sphinx does not know, and several folders have a class of the
    # same name.
    "suppress_warnings": ["misc.highlighting_failure", "ref.python"],
}
FIRST = ("index", "questions", "postmortem", "bugs")
CODE_OR_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`|(?<!!)\[[^]\[]*\]\(([^)\s#:]+)[^)\s]*\)", re.MULTILINE | re.DOTALL
)
PARTS = {"Tour": "tour", "How-tos": "how-to", "API": "api"}


def contents(pages: list[str]) -> str:
    """Return the hidden tables of contents after the first page: what the side bar shows."""
    parts = {
        title: [page for page in pages if page.startswith(f"{folder}/")]
        for title, folder in PARTS.items()
    }
    rest = [page for page in pages if "/" not in page and page not in FIRST]
    tables = {
        "Start": list(FIRST[1:]),
        "Tour": parts.pop("Tour"),
        "Understand a part": rest,
        **parts,
    }
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(found) + "\n```\n"
        for title, found in tables.items()
    )


def module_pages() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a page for each folder of the core: its files in order."""
    core = [PACKAGE, *(PACKAGE / name for name in CORE)]
    for folder in core:
        package = ".".join(folder.relative_to(ROOT).parts)
        files = sorted(folder.glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem))
        parts = []
        for file in files:
            if file.stem == "__main__":
                continue
            name = package if file.stem == "__init__" else f"{package}.{file.stem}"
            parts.append(f"## `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n")
        yield package, f"# {package}\n\n" + "\n".join(parts)


def inline(text: str) -> Iterator[str]:
    """Yield nodes of plain words, and of `code`."""
    for place, part in enumerate(re.split(r"`+([^`\n]+)`+", text)):
        yield rf"\ ``{part}``\ " if place % 2 else re.sub(r"([\\*|_`])", r"\\\1", part)


def as_rst(lines: list[str]) -> list[str]:
    """Return a docstring that renders as in the source: words unchanged, indented lines as code."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if re.search(r"^\s+\S", block, re.MULTILINE):
            found += ["::", "", *(f"    {line}" for line in block.splitlines()), ""]
        else:
            found += [*"".join(inline(block)).splitlines(), ""]
    return found


def without_outside_links(page: Path, text: str) -> str:
    """Return a page's text with the file's path as `code` for each link that leaves the pages.

    page: its path in the repository. Sources and README.md are in no page of the site.
    """

    def plain(found: re.Match[str]) -> str:
        target = (ROOT / page).parent / found[1] if found[1] else ROOT / "docs"
        target = target.resolve()
        return (
            found[0] if target.is_relative_to(ROOT / "docs") else (f"`{target.relative_to(ROOT)}`")
        )

    return CODE_OR_LINK.sub(plain, text)


def write_sources(folder: Path) -> None:
    """Copy the pages, and add those of the package and the tables of contents."""
    shutil.copytree(
        ROOT / "docs",
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__", "build"),
    )
    for path in folder.rglob("*.md"):
        page = Path("docs") / path.relative_to(folder)
        path.write_text(without_outside_links(page, path.read_text()))
    (folder / "api").mkdir()
    for name, text in module_pages():
        (folder / "api" / f"{name}.md").write_text(text)
    pages = sorted(
        str(path.relative_to(folder).with_suffix(""))
        for path in folder.rglob("*.md")
        if path.parts[-2] != "examples"
    )
    index = folder / "index.md"
    index.write_text(index.read_text() + contents(pages))


def build(out: Path, **more: Any) -> int:
    """Build the site into a folder; return Sphinx's status, 0 or 1. more: settings of Sphinx."""
    from sphinx.application import Sphinx

    with tempfile.TemporaryDirectory(prefix="mpipar-site-") as own:
        source = Path(own) / "docs"
        write_sources(source)
        app = Sphinx(
            source,
            None,
            out,
            Path(own) / "doctrees",
            "html",
            SETTINGS | more,
            warningiserror=True,
            status=None,
        )
        app.connect(
            "autodoc-process-docstring",
            lambda app, what, name, thing, options, lines: lines.__setitem__(
                slice(None), as_rst(lines)
            ),
        )
        app.build()
        return int(app.statuscode)


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
