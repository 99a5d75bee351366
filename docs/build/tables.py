"""Tables of the pages: results of benchmarks, and what the program knows about itself.

Listings of sources select functions, methods, classes and constants by name.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from bench import results
from bench.kernels.floors import floors
from docs.build.blocks import Block
from mpipar import errors

# From the ground up: a folder imports only from itself and from the folders named before it.
FLOORS = """errors files ops comm data job config layers models pipeline checkpoint
    console study.schedules trace train study.explain plan inference run interconnect learn
    commands cli __main__""".split()
SOURCES = (".py", ".cu", ".cuh", ".js", ".css", ".html")
COMMENT = re.compile(r"^((?://.*\n)+)|^/\*(.*?)\*/|<!--(.*?)-->", re.MULTILINE | re.DOTALL)


def table(block: Block, root: Path) -> str:
    """Return the table that a block names, by TABLES. Raises PageError."""
    name = next((name for name in TABLES if f"{block.words} ".startswith(f"{name} ")), None)
    if name is None:
        raise block.problem(f"use {', '.join(TABLES)}")
    return TABLES[name](block.words.removeprefix(name).split(), root)


def result(block: Block, root: Path) -> str:
    """Return the rows of a result file; `where tp=4` selects rows, `:: columns a,b` columns."""
    name, _, condition = block.words.partition(" where ")
    found = json.loads(block.file(root, name).read_text())
    if condition:
        key, _, value = condition.partition("=")
        found["rows"] = [row for row in found["rows"] if results.text(row[key]) == value]
    if "columns" in block.options:
        chosen = block.options["columns"].split(",")
        found["rows"] = [{key: row[key] for key in chosen} for row in found["rows"]]
    return results.markdown(found)


def lead(rows: list[dict]) -> str:
    """Return a sentence that compares one rank's step times with PyTorch's best."""
    best = min(row["step_ms"] for row in rows if row["side"].startswith("torch"))
    shown = " and ".join(
        f"{row['step_ms'] / best:.2f}x ({row['side'].split()[1]})"
        for row in rows
        if row["side"].startswith("mpipar ")
    )
    return f"A step takes {shown} as long as PyTorch's fastest variant."


def chapters(root: Path) -> str:
    """Return a line for each chapter of the tour: its title and what follows it."""
    titles = (
        (path, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for path in sorted((root / "docs" / "tour").glob("*.md"))
    )
    return "\n".join(f"- [{title}](tour/{path.name})" for path, title in titles)


def rows_of(head: str, rows: Iterable[Iterable]) -> str:
    """Return a Markdown table of these cells. head: the names of columns, separated by commas."""
    return results.cells_table(head.split(", "), (map(cell, row) for row in rows))


def cell(value) -> str:
    """Return text that stays inside its cell."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    return re.sub(r"(?<![`\w])<([^>]*)>", r"`<\1>`", text)


# --- the map of the sources; bench.reading_path counts the lines that a default training step runs


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring. Raises LookupError if there is none."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(source)) or ""
    else:
        match = COMMENT.search(source)
        text = next(filter(None, match.groups())) if match else ""
        text = re.sub(r"^//", "", text, flags=re.MULTILINE)
    words = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    if not words:
        raise LookupError(f"{path}: say in its first line what is in it")
    return re.match(r".*?[.!](?=\s|$)|.*", words)[0]


def files_below(folder: Path) -> list[Path]:
    """Return the sources in and below a folder, in alphabetical order, files before folders."""
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix in SOURCES and "__pycache__" not in path.parts
    ]
    return sorted(found, key=lambda path: (path.parent, path.name))


def reading_path(root: Path) -> dict:
    """Return the result of bench.reading_path."""
    return json.loads((root / "bench" / "results" / "reading_path.json").read_text())


def path_of_a_step(root: Path) -> str:
    """Return how much a reader of one step opens, how much of it runs, and what set-up adds."""
    step, before = reading_path(root)["rows"][-2:]
    return (
        f"To open for one step: {step['files']} files with {step['lines to open']:,} lines,"
        f" of which {step['lines that run']:,} run; to construct the worker: {before['files']}"
        f" more with {before['lines to open']:,} lines."
    )


def map_rows(root: Path, base: Path, places: dict[Path, list[Path]]) -> Iterable[tuple]:
    """Yield (name below `base`, first sentence, lines a step runs) of each {place: its files}."""
    lines = reading_path(root)["files"]
    for place, files in places.items():
        count = sum(lines.get(str(path.relative_to(root)), 0) for path in files)
        file = place / "__init__.py" if place.is_dir() else place
        name = f"{place.relative_to(base)}{'/' * place.is_dir()}"
        yield f"`{name}`", first_sentence(file), count or "-"


def folders(root: Path) -> list[Path]:
    """Return the folders of the package, from the ground up."""
    below = (root / "mpipar" / floor.replace(".", "/") for floor in FLOORS)
    return [path for path in below if path.is_dir()]


def folder_table(root: Path) -> str:
    """Return what a reader of one step opens, and a line per folder with how much of it runs."""
    rows = map_rows(root, root / "mpipar", {one: files_below(one) for one in folders(root)})
    return f"{path_of_a_step(root)}\n\n{rows_of('folder, what is in it, lines', rows)}"


def file_tables(root: Path) -> str:
    """Return a table for each folder of the package, one for its root, and one for the others."""
    package, parts = root / "mpipar", []
    for folder in [*folders(root), package, root / "bench", root / "docs" / "build"]:
        files = sorted(package.glob("*.py")) if folder == package else files_below(folder)
        rows = map_rows(
            root, folder, {one: [one] for one in files if one != folder / "__init__.py"}
        )
        parts.append(
            f"## {folder.relative_to(root)}/\n\n{first_sentence(folder / '__init__.py')}"
            f"\n\n{rows_of('file, what is in it, lines', rows)}"
        )
    return "\n\n".join(parts)


# Each: (words after its name, root of the repository) -> text. `lead FILE` is a sentence about a
# result of bench.step; `floors MACHINE [flags of explain]` is the least time of a step.
TABLES = {
    "folders": lambda words, root: folder_table(root),
    "files": lambda words, root: file_tables(root),
    "exit codes": lambda words, root: rows_of("exit code, meaning", errors.EXIT_CODES.items()),
    "tour": lambda words, root: chapters(root),
    "path": lambda words, root: path_of_a_step(root),
    "lead": lambda words, root: lead(json.loads((root / words[0]).read_text())["rows"]),
    "floors": lambda words, root: floors(words[0], words[1:]),
}


LANGUAGES = {
    ".py": "python",
    ".cu": "cpp",
    ".cuh": "cpp",
    ".js": "js",
    ".toml": "toml",
    ".sh": "bash",
    ".sbatch": "bash",
}


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
    """Return the lines of one definition; a method as `Class.method`. Raises PageError."""
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
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {
        one.id
        for target in targets
        if target
        for one in ast.walk(target)
        if isinstance(one, ast.Name)
    }
