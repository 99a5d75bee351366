"""Check limits on statements of a function and on lines, which keep code readable.

Prints every finding as path:line: text; exits 1 if there is one. The limits are defined only here:
tests/unit/pages/test_structure.py runs the same check.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FUNCTION_STATEMENTS = 50
LINE_LENGTH = 100
SUFFIXES = {".py", ".cu", ".cuh", ".sbatch", ".js", ".css", ".html"}
LEFTOVER = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|NotImplemented[E]rror)\b")


def problems(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, what is wrong) for one source file."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH:
            yield number, f"{len(line)} characters, more than {LINE_LENGTH}"
        if not line.isascii():
            yield number, "a character that is not ASCII"
        if found := LEFTOVER.search(line):
            yield number, f"leftover: {found[0]}"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = statements(node)
                if size > FUNCTION_STATEMENTS:
                    yield (
                        node.lineno,
                        f"{node.name} has {size} statements, more than {FUNCTION_STATEMENTS}",
                    )


def statements(node: ast.AST) -> int:
    """Count the statements inside a node, without docstrings: formatting does not change it."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    inside = [part for part in ast.walk(node) if part is not node]
    return sum(isinstance(part, ast.stmt) for part in inside) - sum(
        ast.get_docstring(part) is not None
        for part in ast.walk(node)
        if isinstance(part, documented)
    )


def source_files(root: Path) -> list[Path]:
    """Return the sources that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    paths = [root / name for name in listed.stdout.split("\0") if name]
    return sorted(path for path in paths if path.suffix in SUFFIXES and path.is_file())


def findings(root: Path, files: list[Path]) -> list[str]:
    """Return every finding in these files as path:line: text."""
    return [
        f"{path.relative_to(root)}:{number}: {text}"
        for path in files
        for number, text in problems(path, path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    files = source_files(root)
    found = findings(root, files)
    print("\n".join([*found, f"{len(files)} files, {len(found)} findings"]))
    sys.exit(1 if found or not files else 0)
