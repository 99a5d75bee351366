"""The programs of bench/: names, tables and files, limits, what they refuse to time."""

import json
import re
import subprocess
import sys

import pytest
from helpers import run_command, run_ranks
from one_rank import SESSION

from bench import generate
from bench.__main__ import main, programs
from bench.claims import __main__ as claims
from bench.matmul import __main__ as matmul
from mpipar.errors import (
    EXIT_OK,
    EXIT_OUTPUT,
    EXIT_USAGE,
    OutputError,
    UsageError,
)
from mpipar.run.inference import generate as generation

LIMIT = 100  # seconds
TEXTS = "--presets tiny --prompt-tokens 6 --new-tokens 4 --repeats 1 --batch-sizes 2"
PRODUCTS = "--tokens 21 --inner 10 --outer 13 --repeats 2 --dtype float64"
FILES, RECORDS = "--size 4M --repeats 2", "--repeats 5 --steps 2"


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=LIMIT
    )


def measured(path, name, words, ranks=None, codes=(0,)):
    """(finished command, its result file) of a program."""
    argv = [sys.executable, "-m", f"bench.{name}", *words.split(), "--json", str(path)]
    done = run_ranks(ranks, argv, timeout=LIMIT) if ranks else run_command(argv, LIMIT)
    assert done.returncode in codes, done.tail()
    return done, json.loads(path.read_text())


# --- by name


@pytest.mark.parametrize("name", ["recorder"])
def test_both_names_start_the_same_program(name):
    by_runner, by_module = run("bench", name, "--help"), run(f"bench.{name}", "--help")
    assert by_runner.returncode == EXIT_OK
    assert by_runner.stdout == by_module.stdout
    assert f"python -m bench.{name}" in by_runner.stdout


def test_the_list_shows_each_program_with_its_subject(capsys):
    assert main([]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(programs())
    assert {"interconnect", "step", "checkpoint"} <= set(programs())
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_name_is_refused_with_the_next_one(capsys):
    assert main(["comapre"]) == EXIT_USAGE
    assert "did you mean compare?" in capsys.readouterr().err


# --- files that cannot be written are refused before anything is measured


@pytest.fixture
def no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "out.json")


@pytest.mark.parametrize("words", [["barriers"], ["hybrids"]])  # on one rank, and on all together
def test_no_bench_measures_what_it_could_not_write(words, no_folder):
    with pytest.raises(OutputError, match=f"{no_folder}: "):
        claims.main([*words, "--json", no_folder], SESSION)


def test_several_ranks_end_with_one_message(no_folder):
    done = run_ranks(2, [sys.executable, "-m", "bench.recorder", "--json", no_folder], timeout=60)
    assert done.returncode == EXIT_OUTPUT, done.tail()
    assert done.stderr.count(no_folder) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("number", ["0", "-3", "x", "1.5"])
def test_a_size_is_a_whole_number_above_zero(number):
    with pytest.raises(UsageError, match=f"--repeats: '{number}': must be a whole number above 0"):
        matmul.main.parse(["--repeats", number])


# --- what is wrong is not timed, and what is too slow is an exit code: each program is changed


def test_a_wrong_cut_is_not_timed():
    done = changed(
        "matmul.__main__",
        "from mpipar.comm.group import Comm; Comm.reduce_scatter ="
        " lambda self, x, name: x[self.index]",
        PRODUCTS,
        2,
    )
    assert done.returncode == 1, done.tail()
    assert "column_sp on grid 2, rank 0: dx is off by" in done.stdout
    assert "median_ms" not in done.stdout


@pytest.mark.slow
@pytest.mark.peers
def test_wrong_texts_are_not_timed(monkeypatch):
    plain = generation.draw
    monkeypatch.setattr(generation, "draw", lambda *arguments: (plain(*arguments) + 1) % 256)
    with pytest.raises(generate.WrongTextError, match="tiny, mpipar numpy: another token is") as no:
        generate.main(TEXTS.split(), SESSION)
    assert no.value.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "change", "words", "ranks"),
    [
        ("checkpoint", "program.LIMIT = 0.01", f"{FILES} --folder", 1),
        ("recorder", "program.CALL_LIMIT_NS = 1", RECORDS, 2),
    ],
)
def test_a_limit_that_is_not_kept_is_an_exit_code(module, change, words, ranks, tmp_path):
    more = f" {tmp_path}" if module == "checkpoint" else ""
    done = changed(module, change, words + more, ranks)
    assert done.returncode == 1, done.tail()
    assert "limit is exceeded" in done.stdout
    assert module == "recorder" or "load dp=1, as saved" in done.stdout
    assert not list(tmp_path.iterdir())  # it removes what it has written


def changed(module, change, words, ranks):
    """A program in which something is replaced."""
    code = (
        f"import importlib; program = importlib.import_module('bench.{module}'); {change}\n"
        "from mpipar.run.process.session import guard; guard(program.main)"
    )
    return run_ranks(ranks, [sys.executable, "-c", code, *words.split()], timeout=LIMIT)


# --- tables


@pytest.mark.slow
def test_every_part_of_a_checkpoint_is_measured_and_written(tmp_path):
    done, result = measured(
        tmp_path / "checkpoint.json", "checkpoint", f"{FILES} --folder {tmp_path}", 2, codes=(0, 1)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"]
    layouts = ["load dp=2, as saved", "load pp=2", "load tp=2"]
    assert [row["what"] for row in result["rows"]] == [
        "write + fsync",
        "SHA-256",
        "save",
        "save, blocked (--save-async)",
        "save, beside (--save-async)",
        *layouts,
    ]
    state = result["machine"]["state_MiB"]
    assert 3 < state < 5
    for row in result["rows"]:
        held = state if row["what"] == layouts[0] else state / 2
        assert row["MiB_per_rank"] == pytest.approx(held, rel=0.1)
        assert row["GiB_per_s"] == pytest.approx(2 * row["GiB_per_s_and_rank"])
        assert 0 < row["best_ms"] <= row["median_ms"]
    printed = float(re.search(r"takes ([\d.]+) times", done.stdout)[1])
    assert printed == pytest.approx(result["machine"]["save_over_parts"], abs=0.011)
    assert ("the limit is exceeded" in done.stdout) == (done.returncode == 1)


@pytest.mark.slow
def test_every_recorded_operation_is_measured_and_written(tmp_path):
    """Few batches may miss the limits."""
    done, result = measured(tmp_path / "recorder.json", "recorder", RECORDS, 2, codes=(0, 1))
    assert [row["operation"] for row in result["rows"]] == [
        "all_reduce",
        "broadcast",
        "iall_reduce",
        "send_and_receive",
        "span",
    ]
    for row in result["rows"]:
        assert 0 < row["bare_ns"] < row["recorded_ns"]
        assert row["cost_ns"] == row["recorded_ns"] - row["bare_ns"]
    facts = result["machine"]
    assert (facts["ranks"], facts["records_per_step"]) == (2, 10)
    assert f"{facts['percent_of_step']:.3f}% of it; limit 2%" in done.stdout
    assert ("a limit is exceeded" in done.stdout) == (done.returncode == 1)


@pytest.mark.peers
def test_one_rank_generates_beside_transformers(tmp_path):
    path = tmp_path / "generate.json"
    assert generate.main([*TEXTS.split(), "--json", str(path)], SESSION) == 0
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"mpipar numpy", "transformers"} <= rows.keys()
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert row["over_transformers"] == pytest.approx(
            row["tokens_per_s"] / rows["transformers"]["tokens_per_s"]
        )


def test_our_texts_are_timed_without_transformers(tmp_path):
    _, result = measured(tmp_path / "texts.json", "generate", TEXTS)
    row = result["rows"][0]
    assert (row["model"], row["side"], row["batch_size"]) == ("tiny", "mpipar numpy", 2)
    assert row["tokens_per_s"] > 0


@pytest.mark.slow
def test_every_cut_is_measured(tmp_path):
    _, result = measured(tmp_path / "matmul.json", "matmul", PRODUCTS, 4)
    rows = result["rows"]
    one_axis = "column row gather reduce column_sp row_sp column_ring row_ring".split()
    assert [(row["ranks"], row["cut"], row["grid"]) for row in rows] == [
        *((4, cut, "4") for cut in one_axis),
        (4, "2d", "2 x 2"),
        (4, "2.5d", "1 x 1 x 4"),
    ]
    for row in rows:
        assert row["median_ms"] >= row["best_ms"] > 0
        assert 0 < row["in_communication"] < 1
        assert (row["hidden"] == "-") != row["cut"].endswith("ring")
    sent = {row["cut"]: row["sent_MiB"] for row in rows}  # a ring sends what the collectives send
    assert sent["column_ring"] == sent["column_sp"] > 0
    assert sent["row_ring"] == sent["row_sp"] > 0
