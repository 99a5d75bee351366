"""README.md and docs/: links lead somewhere, commands can be typed.

The broken twins below are pages that must be caught. What docs.build writes: test_docs.py.
"""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from helpers import REPOSITORY

from docs.build import commands as docs_commands
from docs.build import measured
from docs.build import pages as docs_pages
from docs.build.blocks import blocks_of
from mpipar import cli
from mpipar.comm.launcher import Launcher
from mpipar.config import flags
from mpipar.errors import UsageError
from mpipar.run.files.settings import read_arguments
from mpipar.run.process.session import Session

PAGES = {str(path): docs_pages.read_page(path) for path in docs_pages.pages()}
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [block for name, page in PAGES.items() for block in blocks_of(Path(name), page)]
# What a reader writes into files before the commands of a page run.
FILES = {name for page in PAGES.values() for name, _ in docs_commands.FILE.findall(page)}
# Their commands run from top to bottom in an empty folder, as a reader types them.
SESSIONS = [
    name
    for name in PAGES
    if name.startswith(
        (
            "docs/tour/",
            "docs/how-to/",
            "docs/questions",
            "docs/planning",
            "docs/failures",
            "docs/install",
            "docs/interconnect",
            "docs/partitioning",
            "docs/schedules",
        )
    )
]
# Parts without sentences: fenced code, what docs.build generates, comments, pictures.
NO_TEXT = re.compile(
    r"^```.*?^```$|<!-- (?:run|measured|code|result|picture|table): "
    r".*?<!-- end -->|<!--.*?-->|!\[[^]]*\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)


# --- links


def anchors(page):
    """The names that a page's headings can be linked by."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }


def broken_links(name, page):
    """The links of a page that lead to no file or heading of the repository."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / name).parent / path if path else REPOSITORY / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    assert broken_links(name, PAGES[name]) == []


def test_broken_links_are_found():
    page = "[a](runs.md) [b](gone.md) [c](runs.md#batches) [d](runs.md#gone) [e](#gone)"
    assert broken_links("docs/speed.md", page) == ["gone.md", "runs.md#gone", "#gone"]


# --- commands


def commands():
    """(page, command) of each command that a page prints: in its blocks, tables and sentences."""
    found = []
    for name, page in PAGES.items():
        blocks = [block for kind, block in FENCED.findall(page) if kind == "bash"]
        lines = [line for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`((?:mpiexec|mpipar|python) [^`]*)`", NO_TEXT.sub("", page))
        found += [
            (name, part.strip())
            for line in lines
            for part in line.split("  #")[0].split(" && ")
            if part.strip()
        ]
    return found


def command_problem(command):
    """The problem of a command of mpipar or Python in a page, None if it can be typed."""
    words = shlex.split(command.partition(" > ")[0])
    if words[0].endswith("mpiexec"):
        words = words[words.index("-n") + 2 :]
    program, *more = [*words, ""][:2]
    if program.endswith("mpipar") and words[1:] not in [[name] for name in cli.COMMANDS]:
        try:
            command, parser = cli.command_of(more[0]), cli.command_parser(more[0])
            typed, problems = flags.parsed(parser, words[2:])
            read_arguments(command.arguments, typed, problems)
        except UsageError as error:
            problems = error.problems
        return "; ".join(problems) or None
    if program == "python" and more == ["-m"] and words[2] != "pytest":
        return None if importlib.util.find_spec(words[2]) else f"no {words[2]}"
    if program == "python" and more[0].endswith(".py"):
        return None if (REPOSITORY / more[0]).exists() or more[0] in FILES else f"no {more[0]}"
    return None


@pytest.mark.parametrize(("name", "command"), commands())
def test_printed_commands_can_be_typed(name, command):
    assert command_problem(command) is None


@pytest.mark.parametrize(
    "command",
    [
        "mpipar trian",
        "mpiexec -n 4 mpipar train --made-up 3",
        "mpipar schedule --pp four",
        "python docs/made_up.py",
        "python -m bench.made_up",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(command):
    assert command_problem(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    sorted(
        {
            command
            for name, command in commands()
            if ".toml" not in command  # a sheet or settings of the reader
            and " --html " not in command  # test_schedule_command.py
            and (name not in SESSIONS or command not in docs_commands.typed(PAGES[name]))
            and command.startswith(("mpipar schedule ", "mpipar explain "))
        }
    ),
)
def test_commands_without_mpi_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = Session(Launcher("none", 0, 1, 0, 1))
    assert cli.main(shlex.split(command)[1:], session) == 0
    assert len(capsys.readouterr().out) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", SESSIONS)
def test_commands_of_a_page_do_what_it_shows(name):
    page = PAGES[name]
    codes = {
        block.words: int(block.options.get("exit", 0))
        for block in blocks_of(Path(name), page)
        if block.kind == "run"
    }
    with contextlib.closing(docs_commands.Workplace(page)) as workplace:
        for command in docs_commands.typed(page):
            code, output = workplace.run(command)
            assert code == codes.get(command, 0), f"{command}\n{output}"
        written = docs_pages.write_page(Path(name), page, workplace)[Path(name)]
    assert written == page, "run python -m docs.build"


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    sorted(
        {
            block.words
            for block in BLOCKS
            if block.kind == "measured" and measured.is_quick(REPOSITORY / block.words)
        }
    ),
)
def test_measured_commands_still_run(file):
    with contextlib.closing(docs_commands.Workplace()) as workplace:
        for row in measured.rows_of(REPOSITORY / file):
            code, output = workplace.run(row["command"])
            assert code == 0, f"{row['command']}\n{output}"
