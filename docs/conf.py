"""Settings of Sphinx for: pip install -e ".[docs]" && python -m sphinx -W docs build/site."""

import re
from pathlib import Path

DOCS = Path(__file__).parent
project = html_title = "mpipar"
author = "The mpipar authors"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["build", "examples"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # a fence may name a language unknown to Sphinx
CODE_OR_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]+`|(?<!!)\[[^]\[]*\]\(([^)\s#:]+)[^)\s]*\)", re.MULTILINE | re.DOTALL
)
SIDE_BAR = {
    "Start": "install runs one-step interconnect schedules",
    "Tour": "tour/*",
    "Understand a part": "*",
    "How-tos": "how-to/*",
}


def plain_links(folder: Path, text: str) -> str:
    """Return a page's text with the file's path as `code` for each link that leaves the pages."""

    def plain(found: re.Match[str]) -> str:
        target = (folder / (found[1] or "")).resolve()
        inside = target.is_relative_to(DOCS)
        return found[0] if inside else f"`{target.relative_to(DOCS.parent)}`"

    return CODE_OR_LINK.sub(plain, text)


def read(app, name: str, source: list[str]) -> None:
    """Change the text of a page as Sphinx reads it: links, and the side bar after the first."""
    source[0] = plain_links((DOCS / name).parent, source[0])
    for title, pages in SIDE_BAR.items() if name == "index" else ():
        lines = "\n".join(pages.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{lines}\n```\n"


def setup(app) -> None:
    """Connect `read`."""
    app.connect("source-read", read)
