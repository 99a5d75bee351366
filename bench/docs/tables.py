"""Tables of the pages: results of benchmarks, and what the program knows about itself."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path

from bench import results
from bench.docs import code_map, combinations, floors
from bench.docs.blocks import Block
from mpipar import cli, errors

MAPS = {"folders": code_map.folder_table, "files": code_map.file_tables}
WIDEST = 400  # characters of a cell


def result(block: Block, root: Path) -> str:
    """The rows of a result file; `where tp=4` selects rows, `:: columns a,b` columns."""
    name, _, condition = block.words.partition(" where ")
    path = root / name
    if not path.is_file():
        raise block.problem(f"no file {name}")
    found = json.loads(path.read_text())
    if condition:
        key, _, value = condition.partition("=")
        found["rows"] = [row for row in found["rows"] if results.text(row[key]) == value]
    if "columns" in block.options:
        chosen = block.options["columns"].split(",")
        found["rows"] = [{key: row[key] for key in chosen} for row in found["rows"]]
    return results.markdown(found)


def file_map(block: Block, root: Path) -> str:
    """The map of the sources: folders, or files."""
    if block.words not in MAPS:
        raise block.problem(f"use one of {', '.join(MAPS)}")
    return MAPS[block.words]()


def table(block: Block, root: Path) -> str:
    """A table of the program's own facts: `exit codes`, `commands`, `flags`, `tour`,
    `combinations`, `choices`.

    `lead FILE` is a sentence: what a result of bench.step says beside PyTorch. `path` is
    another: how much a reader of one step opens. `floors MACHINE [flags of explain]`: the least
    time of a step.
    """
    if block.words.startswith("floors "):
        _, machine, *words = block.words.split()
        return floors.floors(machine, words)
    if block.words.startswith("lead "):
        path = root / block.words.removeprefix("lead ")
        if not path.is_file():
            raise block.problem(f"no file {path.name}")
        return lead(json.loads(path.read_text())["rows"])
    if block.words == "path":
        return code_map.path_of_a_step()
    if block.words == "tour":
        return chapters(root / "docs" / "tour")
    if block.words == "exit codes":
        return rows_of(["exit code", "meaning"], errors.EXIT_CODES.items())
    if block.words == "commands":
        return rows_of(["command", "what it does"],
                       ((f"`mpipar {name}`", text) for name, text in cli.COMMANDS.items()))
    if block.words == "combinations":
        return rows_of(["illegal", "why", "type instead"], combinations.rows())
    if block.words == "choices":
        return rows_of(["only with", "flags"], combinations.choices())
    if block.words == "flags":
        return "\n\n".join(map(flags_of, cli.COMMANDS))
    raise block.problem(
        "use exit codes, commands, flags, combinations, choices, tour, lead FILE, floors MACHINE, "
        "or path")


def lead(rows: list[dict]) -> str:
    """What one rank's sides take of the time of PyTorch's best, and what loops both rest on."""
    theirs = min((row for row in rows if row["side"].startswith("torch")),
                 key=lambda row: row["step_ms"])
    ours = {row["side"].split()[1]: row for row in rows if row["side"].startswith("mpipar ")}
    shown = " and ".join(f"{row['step_ms'] / theirs['step_ms']:.2f} ({name})"
                         for name, row in ours.items())
    loops = [row["blas"].split()[-1] for row in (next(iter(ours.values())), theirs)]
    return (f"A step takes {shown} of the time of PyTorch's best form, with {loops[0]} and"
            f" {loops[1]} products.")


def chapters(folder: Path) -> str:
    """A line for each chapter: its title and what stands behind it."""
    titles = ((path, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
              for path in sorted(folder.glob("*.md")))
    return "\n".join(f"- [{title}](tour/{path.name})" for path, title in titles)


def exercises(block: Block, root: Path) -> str:
    """The tasks of `exercise: 4a 4b`, each with the command that judges an answer."""
    from mpipar.learn.catalog import EXERCISES

    unknown = [name for name in block.words.split() if name not in EXERCISES]
    if unknown:
        raise block.problem(f"no exercise {', '.join(unknown)}")
    parts = []
    for one in map(EXERCISES.get, block.words.split()):
        task = textwrap.fill(f"**{one.id}.** {one.task}", 118, break_on_hyphens=False)
        parts.append(f"{task}\n\n```bash not-run\n{one.command}\n```")
    return "\n\n".join(parts)


def rows_of(head: list[str], rows) -> str:
    """A Markdown table of these cells."""
    return results.cells_table(head, (map(cell, row) for row in rows))


def cell(value) -> str:
    """Text that stays in its cell."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    return re.sub(r"(?<![`\w])<([^>]*)>", r"`<\1>`", text)


def flags_of(command: str) -> str:
    """The arguments and flags of a command, a table for each group of its help."""
    parser, parts = cli.command_parser(command, every=True), [f"## mpipar {command}"]
    for group in parser._action_groups:
        rows = [(f"`{name_of(action)}`", help_of(parser, action)) for action in group._group_actions
                if action.help != argparse.SUPPRESS and "--help" not in action.option_strings]
        if rows:
            title = {"positional arguments": "arguments", "options": "flags"}.get(
                group.title, group.title)
            parts.append(f"### {command}: {title}\n\n{rows_of(['flag', 'meaning'], rows)}")
    return "\n\n".join(parts)


def name_of(action: argparse.Action) -> str:
    """A flag as it is typed, with the form of its value."""
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    if not takes or not action.option_strings:
        return names
    form = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices
                              else action.dest.upper())
    return f"{names} {form}"


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of a flag, with its default filled in."""
    return (action.help or "") % {"prog": parser.prog, "default": action.default,
                                  "choices": action.choices, "metavar": action.metavar}
