"""bench/gpu_session.sh on machines that lack something; a fake python3 runs the parts."""

import os
import re

import pytest
from helpers import REPOSITORY, run_command

SCRIPT = REPOSITORY / "bench" / "gpu_session.sh"
TABLES = ("products", "tiles", "attention", "memory")  # of bench.tiles --device cuda
PARTS = ["gpu tests", "interconnect", "overlap", "tiles", "step float32", "step bfloat16"]
# A stand-in for python3 and mpiexec: nothing is missing, and each part ends as the test says.
MADE_UP = """#!/bin/bash
case "$*" in
    -) cat >/dev/null ;;
    --version) echo Python 3 ;;
    *"-m pytest"*) {tests} ;;
    *--overlap*) {overlap} ;;
    *bench.interconnect*) {interconnect} ;;
    *bench.tiles*) {tiles} ;;
    *bench.step*) {step} ;;
esac
"""


def visit(folder, **env):
    """Run the script with results in folder/out; return how it ended and {part: its line}."""
    env = {"OUT": str(folder / "out"), **env}
    result = run_command(["bash", SCRIPT], 60, env=env, cwd=folder)
    summary = result.stdout.partition("===== summary")[2].splitlines()[1:]
    return result, {re.split(r"\s{2,}", line)[0]: line for line in summary}


def machine(folder, **parts):
    """A folder with a python3 and an mpiexec whose parts end as given; others end well."""
    parts = dict.fromkeys(("tests", "interconnect", "overlap", "tiles", "step"), "exit 0") | parts
    for name in ("python3", "mpiexec"):
        (folder / name).write_text(MADE_UP.format(**parts))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_every_part_is_skipped_by_name_without_a_gpu(tmp_path):
    result, lines = visit(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.tail()
    assert list(lines) == PARTS
    assert all("skipped: " in line and "GPU: " in line for line in lines.values()), result.tail()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["session.log"]
    assert (tmp_path / "out" / "session.log").read_text() == result.stdout


def test_every_part_runs_where_nothing_is_missing(tmp_path):
    write = 'touch "${@: -1}"'  # the word behind --json
    tables = " ".join(f'"${{@: -1}}"/gpu_{name}.json' for name in TABLES)
    result, lines = visit(tmp_path, **machine(
        tmp_path, interconnect=write, step=write, tiles=f"touch {tables}"))
    assert result.returncode == 0, result.tail()
    assert [line.rstrip().endswith(" s  ok") for line in lines.values()] == [True] * len(PARTS)
    for words in ("-m pytest -q -m gpu", "-n 2", "--transport staged", "--overlap 8",
                  "bench.tiles --device cuda", "--dtype float32", "--dtype bfloat16"):
        assert words in result.stdout
    assert len(list((tmp_path / "out").iterdir())) == 8


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, tiles="exit 3"))
    assert result.returncode == 1
    assert lines.pop("tiles").endswith("FAILED: exit code 3")
    assert all(line.endswith("ok") for line in lines.values())


def test_a_part_that_hangs_leaves_no_time(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, interconnect="exec sleep 60"), LIMIT="4")
    assert result.returncode == 1
    assert lines["interconnect"].endswith("FAILED: ended at its time limit")
    assert lines["step float32"].endswith("skipped: 4 s are over")


@pytest.mark.parametrize(("env", "message"), [
    ({"PYTHON": "no-such-python"}, "no no-such-python; name one with PYTHON=FILE"),
    ({"OUT": "full"}, "full can't be written or is not empty; name another with OUT=FOLDER"),
])
def test_what_cannot_start_is_refused(tmp_path, env, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    result, _ = visit(tmp_path, **env)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr

