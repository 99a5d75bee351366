"""What docs.build writes into the pages is up to date, and wrong blocks are refused."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from helpers import REPOSITORY

from bench.kernels.floors import counted
from docs.build import __main__ as program
from docs.build import commands, measured, pages, pictures, reading_path, tables
from docs.build.blocks import PageError, blocks_of, update
from mpipar.errors import DataError
from mpipar.study.explain.predict import predict

PAGES = {str(path): pages.read_page(path) for path in pages.pages()}
PAGE = Path("docs/page.md")
# The memory of large models takes seconds to draw: test_pages.py compares such a page.
SLOW = {
    name
    for name, page in PAGES.items()
    if re.search(r"^<!-- picture: \S+ bars", page, re.MULTILINE)
}


def written(*lines, workplace=None):
    """What a block of a page becomes; lines: the comment, and what stands below it."""
    text = "\n".join([*lines, "<!-- end -->", ""])
    return pages.write_page(PAGE, text, workplace)[PAGE]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in SLOW])
def test_generated_parts_are_up_to_date(name):
    """All but the outputs of commands: test_commands_of_a_page_do_what_it_shows runs these.

    Of a picture the page shows name and figures; its file depends on the version of matplotlib.
    """
    page, *drawn = pages.write_page(Path(name), PAGES[name], None).items()
    assert page[1] == PAGES[name], f"{name}: run python -m docs.build"
    for path, text in drawn:
        assert text.rstrip().endswith("</svg>")
        assert (REPOSITORY / path).is_file(), f"{path}: run python -m docs.build"


def test_the_path_of_a_step_is_as_long_as_the_page_says():
    """Run docs.build.reading_path again when the files that a step opens have changed much."""
    result = json.loads((REPOSITORY / "bench/results/reading_path.json").read_text())
    counted = result["rows"][-1]
    assert counted["files"] == len(result["files"])
    assert counted["lines that run"] == sum(result["files"].values()) <= reading_path.LIMIT
    now = sum(map(reading_path.lines_of, result["files"]))
    assert abs(now - counted["lines to open"]) < 0.05 * now


@pytest.mark.slow
def test_outputs_of_other_pages_are_up_to_date():
    """Those of longer pages run with the slow tests."""
    longer = ("docs/tour", "docs/how-to", "docs/questions", "docs/planning")
    for name, text in PAGES.items():
        kinds = {block.kind for block in blocks_of(Path(name), text)}
        if "run" in kinds and not name.startswith(longer):
            with contextlib.closing(commands.Workplace(text)) as workplace:
                assert pages.write_page(Path(name), text, workplace)[Path(name)] == text


def test_what_is_typed_into_a_generated_part_is_overwritten():
    changed = {name: page.replace("| tp 2 |", "| tp 3 |") for name, page in PAGES.items()}
    names = [name for name, page in PAGES.items() if changed[name] != page]
    assert len(names) >= 2
    for name in names:
        assert pages.write_page(Path(name), changed[name], None)[Path(name)] == PAGES[name]


def test_every_picture_belongs_to_a_page():
    shown = re.findall(r"pictures/([\w-]+\.svg)\)", "".join(PAGES.values()))
    assert {path.name for path in (REPOSITORY / pictures.FOLDER).iterdir()} == set(shown)


# --- blocks


@pytest.fixture
def workplace():
    with contextlib.closing(commands.Workplace("```python mine.py\nprint('mine')\n```\n")) as one:
        yield one


def test_the_same_command_runs_once_in_one_folder(workplace):
    assert workplace.run("python mine.py && echo more > file") == (0, "mine\n")
    assert workplace.run("cat file") == (0, "more\n")
    (workplace.folder() / "file").write_text("other\n")
    assert workplace.run("cat file") == (0, "more\n")
    workplace.close()
    assert not workplace.folder().joinpath("file").exists()


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
        ("measured: bench/results/gone.json", "No such file"),
        ("measured: bench/results/tiles.json", "is a file of bench.tiles"),
        ("picture: one circle", "use a name and one of the kinds timeline"),
        ("picture: one timeline made-up", "made-up"),
        ("picture: one roofline bench/results/gone.json", "gone.json"),
        ("table: gone", "use exit codes"),
        ("result: gone", "no file gone"),
        ("made-up: x", "PLAIN TEXT"),
        ("made: x", "unknown kind of block"),
    ],
)
def test_a_wrong_block_is_refused(comment, message):
    if message == "PLAIN TEXT":
        assert f"<!-- {comment} -->\n<!-- end -->" in written(f"<!-- {comment} -->")
        return
    with pytest.raises(PageError, match=rf"docs/page\.md:1: <!-- .*{re.escape(message)}"):
        written(f"<!-- {comment} -->")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("from made-up", "no line matches 'made-up'"),
        ("exit 2", "exit code 0, not 2"),
    ],
)
def test_a_part_that_is_not_there_is_refused(option, message, workplace):
    with pytest.raises(PageError, match=message):
        written(f"<!-- run: mpipar schedule naive --pp 2 :: {option} -->", workplace=workplace)


@pytest.mark.parametrize("number", range(len(commands.passing_words())))
def test_output_that_only_this_host_prints_is_refused(number, workplace):
    word = commands.passing_words()[number]
    workplace.outputs["echo"] = (0, f"on {word} now")
    with pytest.raises(PageError, match="changes from host to host"):
        written("<!-- run: echo -->", workplace=workplace)


def test_a_block_without_an_end_is_refused():
    with pytest.raises(PageError, match="no <!-- end -->"):
        update(PAGE, "<!-- table: tour -->\ntext\n", lambda block: block.body)
    with pytest.raises(PageError, match="before line 2"):
        update(PAGE, "<!-- table: tour -->\n<!-- table: tour -->\n", lambda block: block.body)


# --- measured outputs


def test_an_output_is_measured_and_shown(tmp_path, monkeypatch):
    file = tmp_path / "one.json"
    measured.measure(file, ["echo one > a", "cat a"])
    measured.measure(file, [])
    assert [row["output"] for row in measured.rows_of(file)] == ["", "one\n"]
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = written("<!-- measured: one.json :: part 2 -->")
    assert "```bash not-run\ncat a\n```\n\n```text\none\n```\n\nMeasured: 20" in page


def test_a_failing_command_is_not_kept(tmp_path):
    with pytest.raises(DataError, match="exit code 3"):
        measured.measure(tmp_path / "one.json", ["exit 3"])
    with pytest.raises(DataError, match="name the commands"):
        measured.measure(tmp_path / "one.json", [])
    assert not list(tmp_path.iterdir())


# --- the command


def test_check_names_the_page_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- table: exit codes -->\n<!-- end -->\n")
    assert program.main(["--check", str(page)]) == 1
    assert "page.md: out of date; run python -m docs.build page.md" in capsys.readouterr().out
    assert program.main([str(page)]) == 0
    assert "| 0 | finished |" in page.read_text()
    assert program.main(["--check", str(page)]) == 0
    page.write_text("<!-- made: up -->\n<!-- end -->\n")
    assert program.main([str(page)]) == 1
    assert "page.md:1:" in capsys.readouterr().err
