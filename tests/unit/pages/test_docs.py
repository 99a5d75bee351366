"""README.md and docs/: links lead somewhere, commands can be typed, generated parts are fresh.

The broken twins below are pages that must be caught.
"""

import contextlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from helpers import REPOSITORY

from bench.kernels.functions import counted
from docs.build import __main__ as program
from docs.build import commands as docs_commands
from docs.build import pictures, tables
from docs.build.blocks import PageError, blocks_of, update
from mpipar import cli
from mpipar.comm.algorithms import ALGORITHMS
from mpipar.comm.launcher import Launcher
from mpipar.config.grid import SCHEDULES
from mpipar.config.run import ALL_REDUCES
from mpipar.config.train import OPTIMIZERS
from mpipar.errors import UsageError
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.run.files.settings import parsed, read_arguments
from mpipar.run.process.session import Session
from mpipar.study.explain.predict import predict

PAGES = {str(path): program.read_page(path) for path in program.all_pages()}
PAGE = Path("docs/page.md")
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What a reader writes into files before the commands of a page run.
FILES = {name for page in PAGES.values() for name, _ in docs_commands.FILE.findall(page)}
# Their commands run from top to bottom in an empty folder, as a reader types them.
TYPED = """docs/tour/ docs/how-to/ docs/questions docs/planning docs/failures docs/install
    docs/interconnect docs/partitioning docs/schedules""".split()
SESSIONS = [name for name in PAGES if name.startswith(tuple(TYPED))]
# The memory of large models takes seconds to draw: the commands of such a page run, and it is
# compared then.
BARS = re.compile(r"^<!-- picture: \S+ bars", re.MULTILINE)
SLOW = {name for name in SESSIONS if BARS.search(PAGES[name])}
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


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    assert broken_links(name, (REPOSITORY / name).read_text()) == []


def test_broken_links_are_found():
    page = "[a](runs.md) [b](gone.md) [c](runs.md#batches) [d](runs.md#gone) [e](#gone)"
    assert broken_links("docs/speed.md", page) == ["gone.md", "runs.md#gone", "#gone"]


# --- tables of names


@pytest.mark.parametrize(
    ("page", "heading", "tables"),
    [
        ("docs/interconnect.md", "How a sum travels", [ALGORITHMS, ALL_REDUCES]),
        ("docs/runs.md", "Optimizer", [OPTIMIZERS]),
        ("docs/schedules.md", "The schedules", [FAMILIES, SCHEDULES]),
    ],
)
def test_a_page_and_the_code_name_the_same(page, heading, tables):
    section = PAGES[page].split(f"\n## {heading}\n")[1].split("\n#")[0]
    names = re.findall(r"^\| `(\w[\w-]*)` \|", section, re.MULTILINE)
    for rows in tables:
        assert sorted(names) == sorted(rows)


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
            typed, problems = parsed(parser, words[2:])
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
def test_commands_without_mpi_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chosen = {
        command
        for name, command in commands()
        if ".toml" not in command  # a sheet or settings of the reader
        and " --html " not in command  # test_schedule_command.py
        and (name not in SESSIONS or command not in docs_commands.typed(PAGES[name]))
        and command.startswith(("mpipar schedule ", "mpipar explain "))
    }
    for command in sorted(chosen):
        session = Session(Launcher("none", 0, 1, 0, 1))
        assert cli.main(shlex.split(command)[1:], session) == 0, command
        assert len(capsys.readouterr().out) > 100, command


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
        written = program.write_page(Path(name), page, workplace)[Path(name)]
    assert written == page, "run python -m docs.build"


# --- what docs.build writes


def written(*lines, workplace=None):
    """What a block of a page becomes; lines: the comment, and what stands below it."""
    text = "\n".join([*lines, "<!-- end -->", ""])
    return program.write_page(PAGE, text, workplace)[PAGE]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in SLOW])
def test_generated_parts_are_up_to_date(name):
    """All but the outputs of commands.

    Of a picture the page shows name and figures; its file depends on the version of matplotlib.
    """
    page, *drawn = program.write_page(Path(name), PAGES[name], None).items()
    assert page[1] == PAGES[name], f"{name}: run python -m docs.build"
    for path, text in drawn:
        assert text.rstrip().endswith("</svg>")
        assert (REPOSITORY / path).is_file(), f"{path}: run python -m docs.build"


@pytest.mark.slow
def test_outputs_of_other_pages_are_up_to_date():
    for name, text in PAGES.items():
        kinds = {block.kind for block in blocks_of(Path(name), text)}
        if "run" in kinds and name not in SESSIONS:
            with contextlib.closing(docs_commands.Workplace(text)) as workplace:
                assert program.write_page(Path(name), text, workplace)[Path(name)] == text


def test_every_picture_belongs_to_a_page():
    shown = re.findall(r"pictures/([\w-]+\.svg)\)", "".join(PAGES.values()))
    assert {path.name for path in (REPOSITORY / pictures.FOLDER).iterdir()} == set(shown)


def test_what_a_step_moves_and_computes_follows_from_its_shapes():
    words = (
        "--preset gpt2 --layers 2 --d-model 24 --heads 3 --seq-len 8 --vocab-size 640"
        " --batch-size 4 --num-microbatches 2 --dtype bfloat16 --device cuda"
    ).split()
    config, found = counted(words)
    rows, width, item = 4 * 8, 24, 2
    norms, microbatches = 2 * 2 + 1, 2
    assert found["layernorm_backward_weight"] == {
        "calls": norms * microbatches,
        "flops": 0,
        "largest": norms * rows * width * item,
        "bytes": norms * (2 * rows * (width * item + 4) + microbatches * 2 * 2 * 4 * width),
    }
    assert found["cross_entropy_backward_input"]["bytes"] == rows * (2 * 640 * item + 8 + 2 * 4)
    assert found["embedding_forward"]["bytes"] == rows * (8 + 2 * width * item)
    steps = predict(config, 0)
    assert found["adamw_runs"]["bytes"] == 30 * sum(length for _, length in steps.segments)
    assert sum(one["flops"] for one in found.values()) == sum(steps.flops.values())
    assert tables.floors("h100", words).count("| memory |") == len(found)  # so small is this model


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("code: mpipar/gone.py main", "no file mpipar/gone.py"),
        ("code: mpipar/cli.py gone", "no gone in the file"),
        ("result: bench/results/gone.json", "no file bench/results/gone.json"),
        ("picture: one circle", "use a name and one of the kinds timeline"),
        ("picture: one timeline made-up", "made-up"),
        ("table: gone", "use exit codes"),
        ("made: x", "unknown kind of block"),
        ("run: mpipar schedule naive --pp 2 :: from made-up", "no line matches 'made-up'"),
        ("run: mpipar schedule naive --pp 2 :: exit 2", "exit code 0, not 2"),
        ("run: hostname", "changes from host to host"),
    ],
)
def test_a_wrong_block_is_refused(comment, message):
    with (
        contextlib.closing(docs_commands.Workplace()) as workplace,
        pytest.raises(PageError, match=rf"docs/page\.md:1: <!-- .*(.|\n)*{re.escape(message)}"),
    ):
        written(f"<!-- {comment} -->", workplace=workplace)


def test_a_block_without_an_end_is_refused():
    with pytest.raises(PageError, match="no <!-- end -->"):
        update(PAGE, "<!-- table: tour -->\ntext\n", lambda block: block.body)
    with pytest.raises(PageError, match="before line 2"):
        update(PAGE, "<!-- table: tour -->\n<!-- table: tour -->\n", lambda block: block.body)


def test_an_output_is_measured_and_shown(tmp_path, monkeypatch):
    file = tmp_path / "one.json"
    docs_commands.measure(file, ["echo one > a", "cat a"])
    docs_commands.measure(file, [])
    assert [row["output"] for row in docs_commands.rows_of(file)] == ["", "one\n"]
    monkeypatch.setattr(program, "ROOT", tmp_path)
    page = written("<!-- measured: one.json :: part 2 -->")
    assert "```bash not-run\ncat a\n```\n\n```text\none\n```\n\nMeasured: 20" in page


def test_a_page_that_is_out_of_date_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- table: exit codes -->\n<!-- end -->\n")
    assert program.main([str(page)]) == 0
    assert capsys.readouterr().out == "page.md: written\n"
    assert "| 0 | finished |" in page.read_text()
    assert program.main([str(page)]) == 0
    assert capsys.readouterr().out == ""
