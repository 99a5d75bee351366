"""Pictures of the pages, drawn from real schedules, shapes and result files."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from bench.docs.blocks import Block, PageError
from mpipar.errors import UserError

FOLDER = Path("docs/pictures")
KINDS = ("timeline", "blocks", "ring", "grid", "memory", "tradeoff", "barrier", "roofline",
         "predicted", "chain", "buckets", "range", "bars", "tokens")


def draw(block: Block, root: Path) -> tuple[Path, str, str]:
    """(path in the repository, SVG, the line of the page) of `picture: NAME KIND ARGUMENTS`.

    Each kind is a module beside this one with `draw(words, root)`, which returns the SVG and its
    alt text. Raises PageError.
    """
    name, *rest = block.words.split()
    if not rest or rest[0] not in KINDS:
        raise block.problem(f"use a name and one of the kinds {', '.join(KINDS)}")
    kind, *words = rest
    try:
        picture, alt = import_module(f"bench.docs.pictures.{kind}").draw(words, root)
    except (UserError, OSError, KeyError, ValueError) as error:
        raise PageError(str(block.problem(f"{type(error).__name__}: {error}"))) from error
    path = FOLDER / f"{name}.svg"
    up = "../" * (len(block.page.parent.parts) - 1) if block.page.parent.parts else "docs/"
    return path, picture, f"![{alt}]({up}pictures/{name}.svg)"
