"""The map of the sources: a line for each folder and each file, its first sentence.

`python -m bench.docs` writes it into README.md and docs/map.md. The column `lines` comes from
bench.docs.reading_path: the lines of a file that a default training step runs.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from bench.results import ROOT

# From the ground up: a folder imports only from itself and from the folders named before it.
FLOORS = """errors files ops comm data partition job config layers models pipeline checkpoint
    console trace train plan inference learn commands cli __main__""".split()
SOURCES = (".py", ".cu", ".cuh", ".js", ".css", ".html")
COMMENT = re.compile(r"^((?://.*\n)+)|^/\*(.*?)\*/|<!--(.*?)-->", re.MULTILINE | re.DOTALL)


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring. Raises LookupError if there is none."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        match = COMMENT.search(source)
        text = next(filter(None, match.groups())) if match else ""
        text = re.sub(r"^//", "", text, flags=re.MULTILINE)
    words = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    if not words:
        raise LookupError(f"{path.relative_to(ROOT)}: say in its first line what is in it")
    return re.match(r".*?[.!](?=\s|$)|.*", words)[0].replace("|", "\\|")


def files_below(folder: Path) -> list[Path]:
    """The sources in a folder and below, in alphabetical order, files before folders."""
    found = [path for path in folder.rglob("*")
             if path.suffix in SOURCES and "__pycache__" not in path.parts]
    return sorted(found, key=lambda path: (path.parent, path.name))


def counted() -> dict:
    """The result of bench.docs.reading_path."""
    return json.loads((ROOT / "bench" / "results" / "reading_path.json").read_text())


def lines_of_a_step() -> dict[str, int]:
    """{path in the repository: lines that a default step runs}."""
    return counted()["files"]


def path_of_a_step() -> str:
    """How much a reader of one step opens, how much of that runs, and what construction adds."""
    step, before = counted()["rows"][-2:]
    return (f"To open for one step: {step['files']} files with {step['lines to open']:,} lines,"
            f" of which {step['lines that run']:,} run; to construct the worker: {before['files']}"
            f" more with {before['lines to open']:,} lines.")


def folders() -> list[Path]:
    """The folders of the package, from the ground up."""
    return [path for path in (ROOT / "mpipar" / floor for floor in FLOORS) if path.is_dir()]


def folder_table() -> str:
    """What a reader of one step opens, and a line for each folder with what of it runs."""
    lines = lines_of_a_step()
    rows = [path_of_a_step(), "", "| folder | what is in it | lines |", "| --- | --- | --- |"]
    for folder in folders():
        count = sum(lines.get(str(path.relative_to(ROOT)), 0) for path in files_below(folder))
        rows.append(f"| `{folder.name}/` | {first_sentence(folder / '__init__.py')} "
                    f"| {count or '-'} |")
    return "\n".join(rows)


def file_tables() -> str:
    """A table for each folder of the package, one for its root, and one for bench/."""
    lines, parts = lines_of_a_step(), []
    root, bench = ROOT / "mpipar", ROOT / "bench"
    for folder in [*folders(), root, bench]:
        rows = [f"## {folder.relative_to(ROOT)}/", "", first_sentence(folder / "__init__.py"), "",
                "| file | what is in it | lines |", "| --- | --- | --- |"]
        files = sorted(root.glob("*.py")) if folder == root else files_below(folder)
        rows += [f"| `{path.relative_to(folder)}` | {first_sentence(path)} "
                 f"| {lines.get(str(path.relative_to(ROOT)), '-')} |"
                 for path in files if path != folder / "__init__.py"]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)
