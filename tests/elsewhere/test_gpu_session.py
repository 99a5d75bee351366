"""bench/gpu_session.sh on machines that lack something; a fake python3 runs the parts."""

import os
import re
import subprocess
import tarfile
import time
import uuid

import pytest
from helpers import MARK, REPOSITORY, kill_with, run_command

SCRIPT = REPOSITORY / "bench" / "gpu_session.sh"
FIRST = ["machine", "check", "races", "step by function", "step beside torch"]
SECOND = ["batch 1", "batch 4", "llama", "experts", "attention", "products", "layouts", "tests"]
REHEARSAL_SECONDS = 900  # g++ compiles all kernels, if no earlier run has left them
MOST_CHARACTERS = 12000  # of what is printed
# A stand-in for python3, mpiexec and others: nothing is missing, and each part ends as a test says.
MADE_UP = """#!/bin/bash
case "$*" in
    -) cat >/dev/null ;;
    --version) echo Python 3 ;;
    *bench.kernels.check*) {check} ;;
    *bench.kernels.attention*) {attention} ;;
    *bench.kernels.*|*bench.step*) {table} ;;
    *mpipar*train*) {train} ;;
esac
"""
TABLE = (
    "for i in {1..100}; do echo '| function | 1 | 2 |'; done;"
    " [[ ${@: -1} == -* ]] || echo '{}' >\"${@: -1}\""  # its result, where it names a file
)


def visit(folder, *halves, **env):
    """Run the script with results in folder/out; return how it ended and {part: its line}."""
    env = {"OUT": str(folder / "out"), "TMPDIR": str(folder), **env}
    result = run_command(["bash", SCRIPT, *halves], 60, env=env, cwd=folder)
    assert len(result.stdout) <= MOST_CHARACTERS
    lines = result.stdout.partition("\n\n==")[0].splitlines()[1:-1]
    return result, {re.split(r"\s{2,}", line)[0]: line for line in lines}


def machine(folder, **parts):
    """A folder with programs whose parts end as given; others end well."""
    parts = dict.fromkeys(("check", "attention", "table", "train"), "exit 0") | parts
    for name in ("python3", "mpiexec", "nvidia-smi", "compute-sanitizer"):
        (folder / name).write_text(MADE_UP.format(**parts))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def packed(folder, half):
    """The names in the only file that a half leaves."""
    assert [path.name for path in (folder / "out").iterdir()] == [f"{half}.tar.gz"]
    with tarfile.open(folder / "out" / f"{half}.tar.gz") as archive:
        return {os.path.basename(name) for name in archive.getnames() if "." in name[1:]}


def test_every_part_is_skipped_by_name_without_a_gpu(tmp_path):
    result, lines = visit(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.tail()
    assert list(lines) == FIRST + SECOND
    assert all("skipped: " in line and "GPU: " in line for line in lines.values()), result.tail()
    assert packed(tmp_path, "first-and-second") == {"summary.txt"}


@pytest.mark.parametrize(("half", "parts"), [("first", FIRST), ("second", SECOND)])
def test_every_part_runs_where_nothing_is_missing(half, parts, tmp_path):
    result, lines = visit(tmp_path, half, **machine(tmp_path, check=TABLE, table=TABLE))
    assert result.returncode == 0, result.tail()
    assert [line.rstrip().endswith(" s  ok") for line in lines.values()] == [True] * len(parts)
    names = packed(tmp_path, half)
    assert {f"{n:02}-{one.replace(' ', '-')}.log" for n, one in enumerate(parts, 1)} < names
    assert ("step-beside-torch.json" in names) == (half == "first")
    with tarfile.open(tmp_path / "out" / f"{half}.tar.gz") as archive:
        logs = [archive.extractfile(one).read().decode() for one in archive if ".log" in one.name]
    gpt2 = "--layers 12 --d-model 768 --heads 12 --seq-len 1024 --vocab-size 50304"
    assert sum(f"{gpt2} --dtype bfloat16" in log for log in logs) == 2


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path):
    result, lines = visit(tmp_path, **machine(tmp_path, check="echo wrong; exit 3"))
    assert result.returncode == 1
    for name in ("check", "races"):  # of the same program
        assert lines.pop(name).endswith("FAILED: exit code 3")
    assert all(line.endswith("ok") for line in lines.values())
    assert "== 02-check\nwrong" in result.stdout


@pytest.mark.slow
def test_a_part_that_hangs_leaves_no_time(tmp_path):
    env = machine(tmp_path, attention="exec sleep 60")
    result, lines = visit(tmp_path, "second", LIMIT="8", **env)
    assert result.returncode == 1
    assert lines["attention"].endswith("FAILED: ended at its time limit")
    assert lines["tests"].endswith("skipped: 4 s are over")


def test_a_visit_that_is_cut_leaves_what_has_ended(tmp_path):
    mark, out = uuid.uuid4().hex, tmp_path / "out"
    env = {"OUT": str(out), MARK: mark, **machine(tmp_path, attention="exec sleep 60")}
    words = ["bash", SCRIPT, "second"]
    process = subprocess.Popen(words, env=os.environ | env, stdout=subprocess.PIPE, text=True)
    try:
        while not process.stdout.readline().startswith("experts"):
            assert process.poll() is None
        time.sleep(0.5)
    finally:
        kill_with(MARK, mark)
        process.wait(20)
    with tarfile.open(out / "second.tar.gz") as archive:
        lines = archive.extractfile("./summary.txt").read().decode().splitlines()
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == SECOND[:4]


def test_a_wheel_of_mpich_that_is_carried_along_is_used(tmp_path):
    wheel = tmp_path / "wheel" / "mpich-5.0.2.data" / "data"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "lib").mkdir()
    (wheel / "lib" / "libmpi.so.12").touch()
    for name in ("mpiexec", "hydra_pmi_proxy"):
        (wheel / "bin" / name).write_text(
            "#!/bin/bash\necho from the wheel: $MPI4PY_LIBMPI; exit 1\n"
        )
    result, _ = visit(tmp_path, "second", MPICH="wheel", **machine(tmp_path))
    assert f"from the wheel: {wheel}/lib/libmpi.so.12" in result.stdout
    assert os.access(wheel / "bin" / "hydra_pmi_proxy", os.X_OK)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(REHEARSAL_SECONDS + 60)
@pytest.mark.skipif("CUDA_MACHINE_DEVICE" not in os.environ, reason="not on the CUDA machine")
@pytest.mark.parametrize(("half", "parts"), [("first", FIRST), ("second", SECOND)])
def test_a_rehearsal(half, parts, tmp_path):
    """Every part but the one beside PyTorch runs, at small sizes, on the real CuPy."""
    env = {"OUT": str(tmp_path / "out"), "REHEARSE": "1", "LIMIT": str(2 * REHEARSAL_SECONDS - 90)}
    result = run_command(["bash", SCRIPT, half], REHEARSAL_SECONDS, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.tail()
    lines = result.stdout.partition("\n\n==")[0].splitlines()[1:-1]
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == parts
    skipped = [line for line in lines if not line.endswith("ok")]
    assert all("skipped: torch" in one or "compute-sanitizer" in one for one in skipped), skipped


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ([], {"PYTHON": "no-such-python"}, "no no-such-python; name one with PYTHON=FILE"),
        (["first"], {"OUT": "full"}, "full can't be written or has first.tar.gz; name another"),
        ([], {"MPICH": "full"}, "no libmpi.so.12 below full; unpack a wheel of mpich there"),
        (["third"], {}, "third: say first or second, or nothing for both"),
    ],
)
def test_what_cannot_start_is_refused(tmp_path, words, env, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "first.tar.gz").touch()
    result = run_command(["bash", SCRIPT, *words], 60, cwd=tmp_path, env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
