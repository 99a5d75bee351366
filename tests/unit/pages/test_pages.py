"""README.md and docs/: links lead somewhere, commands can be typed.

The broken twins below are pages that must be caught. What docs.build writes: test_docs.py.
"""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from helpers import REPOSITORY

from docs.build import commands as docs_commands
from docs.build import measured
from docs.build import pages as docs_pages
from docs.build.blocks import blocks_of, update
from mpipar import cli
from mpipar.comm.launcher import Launcher
from mpipar.config import flags
from mpipar.errors import EXIT_CODES, UsageError
from mpipar.run.files.settings import read_arguments
from mpipar.run.process.session import Session

PAGES = {str(path): docs_pages.read_page(path) for path in docs_pages.pages()}
README = PAGES["README.md"]
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
FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# Parts without sentences: fenced code, what docs.build generates, comments, pictures.
NO_TEXT = re.compile(
    r"^```.*?^```$|<!-- (?:run|measured|code|result|picture|table): "
    r".*?<!-- end -->|<!--.*?-->|!\[[^]]*\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
README_COMMAND = re.compile(r"<!-- command: (\w+) -->\n```bash\n")


def test_exit_codes_are_those_of_the_program():
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|$", PAGES["docs/failures.md"], re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_columns_are_those_of_the_program():
    sources = "".join(path.read_text() for path in (REPOSITORY / "mpipar").rglob("*.py"))
    tables = re.findall(
        r"^\| column \| meaning \|\n(?:\|.*\n)+", "\n".join(PAGES.values()), re.MULTILINE
    )
    cells = re.findall(r"^\| (`[^|]*) \|", "".join(tables), re.MULTILINE)
    names = [name for cell in cells for name in re.findall("`(.*?)`", cell)]
    assert len(tables) >= 5
    assert len(names) > 50
    assert [name for name in names if name not in sources] == []


def test_every_scenario_has_a_command_and_an_answer():
    """The titles of the course's six cases stand word for word, and every row leads somewhere."""
    table = PAGES["docs/questions.md"].split("## Scenarios")[1].split("\n\n")[2]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert (
        sum(
            title.startswith("[") and "](https://1cademy.com/node/" in title for title, _, _ in rows
        )
        == 6
    )
    for title, command, answer in rows:
        assert command_problem(command.strip("`")) is None, title
        assert re.search(r"\]\([\w/.#-]+\)", answer), title


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


def links(name):
    """The pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", PAGES[name])
    paths = [(REPOSITORY / name).parent / target for target in targets]
    return {str(path.resolve().relative_to(REPOSITORY)) for path in paths if path.exists()}


def test_every_page_can_be_reached_from_the_readme():
    reached, open_pages = set(), {"README.md"}
    while open_pages:
        reached |= open_pages
        open_pages = {one for name in open_pages for one in links(name)} & set(PAGES) - reached
    assert sorted(set(PAGES) - reached) == []


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


def sources_of(module):
    """The files of `python -m module`: one, or all of a package that can be run."""
    place = REPOSITORY / module.replace(".", "/")
    if (place / "__main__.py").exists():
        return sorted(place.rglob("*.py"))
    return [path for path in [Path(f"{place}.py")] if path.exists()]


def command_problem(command):
    """The problem of a command of a page, None if it can be typed as it stands."""
    words = shlex.split(command.partition(" > ")[0])
    if re.search(r"mpiexec(\.\w+)?$", words[0]):
        words = words[words.index("-n") + 2 :]
    if not words:  # `mpiexec -n 4` alone: what to put before a command
        return None
    if any(re.fullmatch(r"[A-Z_]+|[A-Z]+\.\w+", word) for word in words[1:]):
        return "a placeholder in place of a value"
    program = words[0].removeprefix(".venv/bin/")
    if program == "mpipar" and words[1:] not in [[name] for name in cli.COMMANDS]:
        try:
            command, parser = cli.command_of(words[1]), cli.command_parser(words[1])
            typed, problems = flags.parsed(parser, words[2:])
            read_arguments(command.arguments, typed, problems)
        except UsageError as error:
            problems = error.problems
        return "; ".join(problems) or None
    if program == "python" and words[1] != "-m":
        here = (REPOSITORY / words[1]).exists() or words[1] in FILES
        return None if here else f"no {words[1]}"
    if program == "python" and words[2] != "pytest":
        sources = sources_of(words[2])
        shared = [REPOSITORY / "bench" / name for name in ("program.py", "training.py")]
        given = {word.partition("=")[0] for word in words[3:] if word.startswith("--")}
        known = {
            flag
            for file in [*sources, *shared]
            for flag in re.findall(r"--[\w-]+", file.read_text())
        }
        return f"no {words[2]}" if not sources else f"no {given}" if given - known else None
    if program not in (
        "pip",
        "apt-get",
        "conda",
        "module",
        "srun",
        "python",
        "python3",
        ".",
        "source",
        "sbatch",
        "bash",
        "mpipar",
        "find",
        "head",
    ):
        return f"no program {program}"
    return None


@pytest.mark.parametrize(("name", "command"), commands())
def test_printed_commands_can_be_typed(name, command):
    assert command_problem(command) is None


@pytest.mark.parametrize(
    "command",
    [
        "mpipar trian",
        "mpipar trace RUN",
        "mpiexec -n 4 mpipar train --made-up 3",
        "mpipar schedule --pp four",
        "python docs/made_up.py",
        "python -m bench.made_up",
        "python -m bench.matmul --made-up",
        "mpirun -n 4 mpipar train",
    ],
)
def test_a_command_that_cannot_be_typed_is_found(command):
    assert command_problem(command)


def blocks_without_a_test(name, page, sessions=SESSIONS):
    """Blocks of commands that no test runs, and that are not marked: `bash not-run`.

    test_docs.py and test_commands_of_a_page_do_what_it_shows run generated blocks, and .ci/run the
    named commands of the README.
    """
    own = update(Path(name), page, lambda block: "")
    if name == "README.md":
        steps = (REPOSITORY / ".ci" / "run").read_text()
        own = README_COMMAND.sub(
            lambda found: "```bash not-run\n" if f"'readme {found[1]}'" in steps else found[0], own
        )
    return [
        text
        for info, text in FENCE.findall(own)
        if info.startswith(("bash", "sh", "console"))
        and info != "bash not-run"
        and not (info == "bash" and f"\n```bash\n{text}" in own and name in sessions)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_commands_run_or_are_marked(name):
    found = blocks_without_a_test(name, PAGES[name])
    assert not found, f"run them (SESSIONS), or mark them `bash not-run`:\n{''.join(found)}"


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("docs/speed.md", "```bash\nls\n```"),
        ("README.md", "\n```bash\nls\n```"),
        ("README.md", "<!-- command: gone -->\n```bash\nls\n```"),
        ("docs/tour/01.md", "\n```bash notrun\nls\n```"),
        ("docs/tour/01.md", "\n```shell\nls\n```"),
        ("docs/tour/01.md", "- a list\n\n  ```bash\n  ls\n  ```"),
    ],
)
def test_commands_that_nothing_runs_are_found(name, page):
    assert blocks_without_a_test(name, page, ["docs/tour/01.md"])


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("docs/speed.md", "```bash not-run\nls\n```"),
        ("docs/tour/01.md", "\n```bash\nls\n```"),
        ("docs/speed.md", "<!-- run: ls -->\n```bash\nls\n```\n<!-- end -->"),
        ("README.md", "<!-- command: test -->\n```bash\nls\n```"),
        ("docs/speed.md", "```text\nls\n```"),
    ],
)
def test_commands_that_run_or_are_marked_are_not_found(name, page):
    assert blocks_without_a_test(name, page, ["docs/tour/01.md"]) == []


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
