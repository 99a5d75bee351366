"""Listings of the sources: functions, methods, classes and constants by their names."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from bench.docs.blocks import Block, part

LANGUAGES = {".py": "python", ".cu": "cpp", ".cuh": "cpp", ".js": "js", ".toml": "toml",
             ".sh": "bash", ".sbatch": "bash"}


def listing(block: Block, root: Path) -> str:
    """The listing that a `code` block asks for, and a link to its file."""
    name, *names = block.words.split()
    path = root / name
    if not path.is_file():
        raise block.problem(f"no file {name}")
    source = path.read_text(encoding="utf-8")
    if names:
        text = "\n\n\n".join(definition(block, source, one) for one in names)
    else:
        text = "\n".join(part(block, source.rstrip().splitlines()))
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
    lines = source.splitlines()
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    kept = list(range(first, node.end_lineno + 1))
    if block.options.get("no") == "docstring" and nodes and is_text(nodes[0]):
        kept = [one for one in kept if not nodes[0].lineno <= one <= nodes[0].end_lineno]
    return textwrap.dedent("\n".join(lines[one - 1] for one in kept))


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {one.id for target in targets if target for one in ast.walk(target)
            if isinstance(one, ast.Name)}


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
