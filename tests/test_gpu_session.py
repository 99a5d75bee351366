"""bench/gpu_session.sh on machines that lack something; a fake python3 runs the parts."""

import json
import os
import re
import subprocess
import time
import uuid

import pytest
from helpers import MARK, REPOSITORY, kill_with, run_command

SCRIPT = REPOSITORY / "bench" / "gpu_session.sh"
TABLES = ["attention", "memory", "products", "tiles"]  # of bench.tiles --device cuda
STEPS = ["step, V 50257", "step, V 50304", "step beside torch"]
PARTS = [*STEPS, *TABLES, "interconnect", "overlap", "gpu tests"]
REHEARSAL_SECONDS = 900  # g++ compiles all kernels, if no earlier run has left them
# A stand-in for python3 and mpiexec: nothing is missing, and each part ends as the test says.
MADE_UP = """#!/bin/bash
case "$*" in
    -) cat >/dev/null ;;
    --version) echo Python 3 ;;
    *"-m pytest"*) {tests} ;;
    *--overlap*) {overlap} ;;
    *bench.interconnect*) {interconnect} ;;
    *bench.tiles*) {tiles} ;;
    *--no-compiled*) {eager} ;;
    *"--sides best"*) {best} ;;
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
    parts = (
        dict.fromkeys(
            ("tests", "interconnect", "overlap", "tiles", "step", "best", "eager"), "exit 0"
        )
        | parts
    )
    for name in ("python3", "mpiexec"):
        (folder / name).write_text(MADE_UP.format(**parts))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_every_part_is_skipped_by_name_without_a_gpu(tmp_path):
    result, lines = visit(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.tail()
    assert list(lines) == PARTS
    assert all("skipped: " in line and "GPU: " in line for line in lines.values()), result.tail()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"session.log", "summary.txt"}
    assert (tmp_path / "out" / "session.log").read_text() == result.stdout


def test_every_part_runs_where_nothing_is_missing(tmp_path):
    write = 'touch "${@: -1}"'  # the word behind --json
    table = 'touch "${@: -1}"/gpu_"${@: -3:1}".json'  # its folder, and the word behind --tables
    result, lines = visit(
        tmp_path, **machine(tmp_path, interconnect=write, step=write, best=write, tiles=table)
    )
    assert result.returncode == 0, result.tail()
    assert [line.rstrip().endswith(" s  ok") for line in lines.values()] == [True] * len(PARTS)
    for words in (
        "--layers 12 --d-model 768 --heads 12 --seq-len 1024 --batch-size 32",
        "--dtype bfloat16",
        "--sides own",
        "--sides best",
        "--vocab-size 50304",
        "-n 2",
        "--transport staged",
        "--overlap 8",
        "--dist worksteal -m gpu tests",
    ):
        assert words in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "session.log",
        "summary.txt",
        "step_50257.json",
        "step_50304.json",
        "step_torch.json",
        "interconnect.jsonl",
        *(f"gpu_{name}.json" for name in TABLES),
    }


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, tiles="exit 3"))
    assert result.returncode == 1
    assert all(lines.pop(name).endswith("FAILED: exit code 3") for name in TABLES)
    assert all(line.endswith("ok") for line in lines.values())


def test_a_part_that_hangs_leaves_no_time(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, interconnect="exec sleep 60"), LIMIT="4")
    assert result.returncode == 1
    assert lines["interconnect"].endswith("FAILED: ended at its time limit")
    assert lines["gpu tests"].endswith("skipped: 4 s are over")


def test_pytorch_runs_eagerly_where_it_cannot_be_compiled(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, best="exit 1"))
    assert result.returncode == 1
    assert lines["step beside torch"].endswith("FAILED: exit code 1")
    assert lines["the same, eager"].endswith("ok")


def test_a_visit_that_is_cut_leaves_what_has_ended(tmp_path):
    out, mark = tmp_path / "out", uuid.uuid4().hex
    env = {"OUT": str(out), MARK: mark, **machine(tmp_path, tiles="exec sleep 60")}
    process = subprocess.Popen(["bash", SCRIPT], env=os.environ | env, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (out / "session.log").exists() or (
            "===== attention" not in (out / "session.log").read_text()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_with(MARK, mark)
        process.wait(20)
    lines = (out / "summary.txt").read_text().splitlines()
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == STEPS


def test_a_wheel_of_mpich_that_is_carried_along_is_used(tmp_path):
    wheel = tmp_path / "wheel" / "mpich-5.0.2.data" / "data"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "lib").mkdir()
    (wheel / "lib" / "libmpi.so.12").touch()
    for name in ("mpiexec", "hydra_pmi_proxy"):
        (wheel / "bin" / name).write_text("#!/bin/bash\necho from the wheel: $MPI4PY_LIBMPI\n")
    result, lines = visit(tmp_path, MPICH="wheel", **machine(tmp_path))
    assert result.returncode == 0, result.tail()
    assert lines["interconnect"].endswith("ok")
    assert result.stdout.count(f"from the wheel: {wheel}/lib/libmpi.so.12") == 2
    assert os.access(wheel / "bin" / "hydra_pmi_proxy", os.X_OK)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(REHEARSAL_SECONDS + 60)
@pytest.mark.skipif("CUDA_MACHINE_DEVICE" not in os.environ, reason="not on the CUDA machine")
def test_a_rehearsal(tmp_path):
    """Every part but the one beside PyTorch runs, at small sizes, on the real CuPy."""
    out = tmp_path / "out"
    result = run_command(
        ["bash", SCRIPT],
        REHEARSAL_SECONDS,
        cwd=tmp_path,
        env={"OUT": str(out), "REHEARSE": "1", "LIMIT": str(REHEARSAL_SECONDS - 20)},
    )
    assert result.returncode == 0, result.tail()
    lines = (out / "summary.txt").read_text().splitlines()
    assert len(lines) == len(PARTS)
    assert all(line.endswith("ok") for line in lines if "torch" not in line), result.tail()
    for name in ("step_250", "step_256", *(f"gpu_{table}" for table in TABLES)):
        assert json.loads((out / f"{name}.json").read_text())["rows"], name


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PYTHON": "no-such-python"}, "no no-such-python; name one with PYTHON=FILE"),
        ({"OUT": "full"}, "full can't be written or is not empty; name another with OUT=FOLDER"),
        ({"MPICH": "full"}, "no libmpi.so.12 below full; unpack a wheel of mpich there"),
    ],
)
def test_what_cannot_start_is_refused(tmp_path, env, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    result, _ = visit(tmp_path, **env)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
