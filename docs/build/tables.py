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
from bench.kernels.functions import counted
from docs.build.blocks import Block
from mpipar import errors
from mpipar.study.plan.job import utilization
from mpipar.study.plan.machine import load_machine


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


def floors(machine: str, words: list[str]) -> str:
    """Return the least time of a step on a machine of `mpipar plan`, function by function, and the
    resulting MFU.

    No function can be faster than the bytes that it has to move at the memory's rate, or than its
    FLOPs at the peak of products.
    """
    sheet, (config, found) = load_machine(machine), counted(words)
    peak, memory = sheet.peak_tflops[config.run.dtype] * 1e12, sheet.hbm_gbytes_s * 1e9
    rows, likely = [], 0.0
    for name, one in found.items():
        moving, computing = one["bytes"] / memory, one["flops"] / peak
        rows.append(
            {
                "function": name,
                "calls": one["calls"],
                "MB": one["bytes"] * 1e-6,
                "passes": one["bytes"] / one["largest"],
                "GFLOP": one["flops"] * 1e-9 or "-",
                "floor_us": max(moving, computing) * 1e6,
                "bound_by": "memory" if moving > computing else "products",
            }
        )
        rate = sheet.attention_tflops if "attention" in name else sheet.product_tflops
        likely += max(moving, one["flops"] / (rate * 1e12))
    rows.sort(key=lambda row: -row["floor_us"])
    floor = sum(row["floor_us"] for row in rows) * 1e-6
    of_memory = sum(row["floor_us"] for row in rows if row["bound_by"] == "memory")
    flops = sum(one["flops"] for one in found.values())
    most, share = (
        100 * utilization(flops, seconds, 1, peak * 1e-12) for seconds in (floor, likely)
    )
    return (
        f"{results.markdown_table(rows)}\n\nAll floors together are {floor * 1e3:.1f} ms, those of"
        f" memory {of_memory * 1e-3:.1f} ms. The MFU of this step of {flops * 1e-12:.1f} TFLOP"
        f" is therefore at most {most:.0f} %.\n**An estimate, not measured:**"
        f" {likely * 1e3:.0f} ms and {share:.0f} % with memory at its full rate, products at"
        f" {sheet.product_tflops:.0f} and attention at {sheet.attention_tflops:.0f}"
        " TFLOP/s."
    )


# Each: (words after its name, root of the repository) -> text. `lead FILE` is a sentence about a
# result of bench.step; `floors MACHINE [flags of explain]` is the least time of a step.
TABLES = {
    "exit codes": lambda words, root: rows_of("exit code, meaning", errors.EXIT_CODES.items()),
    "tour": lambda words, root: chapters(root),
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
