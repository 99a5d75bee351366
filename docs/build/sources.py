"""Listings of the sources: functions, methods, classes and constants by their names."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from docs.build.blocks import Block

LANGUAGES = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".js": "js", ".toml": "toml",
             ".sh": "bash", ".sbatch": "bash"}


def listing(block: Block, root: Path) -> str:
    """`code: FILE [NAME Class.method]`: these definitions or the whole file, and a link to it."""
    name, *names = block.words.split()
    path = block.file(root, name)
    source = path.read_text(encoding="utf-8")
    if names:
        text = "\n\n\n".join(definition(block, source, one) for one in names)
    else:
        text = "\n".join(block.part(source.rstrip().splitlines()))
    up = "../" * len(block.page.parent.parts)
    language = LANGUAGES.get(path.suffix, "text")
    return f"```{language}\n{text}\n```\n\nFrom [{name}]({up}{name})."


def definition(block: Block, source: str, name: str) -> str:
    """The lines of one definition; a method as `Class.method`. Raises PageError."""
    nodes, node = ast.parse(source).body, None
    for word in name.split("."):
        node = next((one for one in nodes if word in names_of(one)), None)
        if node is None:
            raise block.problem(f"no {name} in the file")
        nodes = getattr(node, "body", [])
    first = min(one.lineno for one in (node, *getattr(node, "decorator_list", [])))
    kept = set(range(first, node.end_lineno + 1))
    if block.options.get("no") == "docstring" and nodes and isinstance(nodes[0], ast.Expr):
        kept -= set(range(nodes[0].lineno, nodes[0].end_lineno + 1))
    lines = source.splitlines()
    return textwrap.dedent("\n".join(lines[one - 1] for one in sorted(kept)))


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {one.id for target in targets if target for one in ast.walk(target)
            if isinstance(one, ast.Name)}
