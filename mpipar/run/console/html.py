"""Builds one self-contained HTML page from its parts: it needs no network and no other files.

The folder page/ holds what every page has: page.html, base.css with the colours of both themes, and
base.js.
"""

import json
import re
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable

from mpipar.config.text import harmless


def build(folder: Traversable, scripts: tuple[str, ...], data: dict, **more: str) -> str:
    """Return the page of a folder with body.html, page.css and these scripts, showing `data`.

    data: values for JSON, one of them `title`. more: texts for other placeholders in body.html,
    such as [[ORDERS]].
    """
    base = files("mpipar.run.console") / "page"
    # A "<" could close the script element that holds the data, or open a comment in it.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    texts = {
        "TITLE": escape(harmless(data["title"])),
        "STYLE": joined([base / "base.css", folder / "page.css"]),
        "SCRIPT": joined([base / "base.js", *(folder / name for name in scripts)]),
        "DATA": numbers,
        **more,
    }
    # All placeholders at once, because a run may be named [[DATA]].
    skeleton = joined([base / "page.html"]).replace("[[BODY]]", joined([folder / "body.html"]))
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda mark: texts[mark[1]], skeleton)


def joined(parts: list[Traversable]) -> str:
    """Return the concatenated texts of these files."""
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)
