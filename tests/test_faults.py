"""What a reviewer would do to a run: one rank goes wrong somewhere, and a resume loses nothing.

The numbers are those of the table in docs/failures.md. Other tests carry the mark `fault` as well.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from fault_table import fault
from helpers import MARK, REPOSITORY, find_launcher, kill_with, run_ranks, wait_for_end
from program import LIMIT, PROGRAM, environment, metrics, mpipar, one_block

from mpipar.checkpoint.manifest import committed_steps, damage

pytestmark = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
DYING = [sys.executable, str(REPOSITORY / "tests" / "dying_run.py")]
OVER_NCCL = [sys.executable, str(REPOSITORY / "tests" / "nccl_run.py")]
RUN = """train --data text.txt --out run --pp 2 --layers 3 --d-model 8 --heads 2 --seq-len 5
    --batch-size 4 --num-microbatches 2 --steps 6 --save-interval 2 --sample-tokens 0
    --resume auto""".split()
SAME = "step loss grad_norm lr loss_scale skipped calls bytes".split()  # in each line of metrics
ANY = None  # the launcher's own code for ranks that were killed


@dataclass(frozen=True)
class Case:
    """A fault: its number, what happens, where (see dying_run.py), to which rank, the exit code."""

    number: int
    what: str
    place: str
    how: str
    code: int
    rank: int = 1
    ranks: int = 2
    quick: bool = False

    def parameter(self):
        marks = [fault(self.number, self.what, self.code)]
        return pytest.param(self, marks=marks + [pytest.mark.slow] * (not self.quick),
                            id=f"{self.number}-{self.what}".replace(" ", "-"))


KILLED = [Case(25, f"kill -9 of a rank: {place}", place, "kill", 69, rank, quick=quick)
          for place, rank, quick in (
              ("init", 1, False), ("reading the data", 1, False), ("forward", 1, False),
              ("backward", 1, False), ("send", 1, False), ("receive", 1, False),
              ("all-reduce", 1, False), ("optimizer", 1, False), ("save", 1, False),
              ("commit", 0, True), ("evaluation", 1, False), ("finalize", 1, False))]
LEFT = [Case(42, f"a library ends a rank with exit code 0: {place}", place, "leave", 70, rank,
             quick=quick)
        for place, rank, quick in (
            ("init", 1, False), ("forward", 1, True), ("finalize", 0, False))]
RAISED = [Case(26, f"exception in the {name} stage", "forward", "raise", 70, rank, 3)
          for rank, name in enumerate(("first", "middle", "last"))]
STOPPED = [Case(27, "SIGUSR1 before the first step", "reading the data", "usr1", 75),
           Case(27, "SIGUSR1 to a rank", "forward", "usr1", 75, quick=True),
           Case(28, "SIGTERM to a rank", "backward", "term", 75),
           Case(41, "SIGHUP to a rank: its terminal was closed", "forward", "hangup", 75),
           Case(29, "Ctrl-C at a rank", "optimizer", "interrupt", 75),
           Case(27, "SIGUSR1 during a save", "save", "usr1", 75),
           Case(27, "SIGUSR1 after the last save", "evaluation", "usr1", 75)]


@pytest.fixture
def here(tmp_path):
    (tmp_path / "text.txt").write_text("a short text, again and again. " * 30)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: number of ranks -> what a run leaves that nothing has interrupted."""
    done = {}

    def run(ranks):
        if ranks not in done:
            folder = tmp_path_factory.mktemp("whole")
            (folder / "text.txt").write_text("a short text, again and again. " * 30)
            result = mpipar(*RUN, "--pp", ranks, ranks=ranks, cwd=folder)
            assert result.returncode == 0, result.tail()
            done[ranks] = left_by(folder / "run")
        return done[ranks]

    return run


def left_by(folder):
    """What two runs must share to the last bit: weights, state, and metrics without times."""
    steps = committed_steps(folder / "checkpoints")
    files = [*folder.glob("weights/*"), *steps[-1][1].glob("*.safetensors")]
    found = {path.name: path.read_bytes() for path in files}
    found["metrics"] = [{key: line.get(key) for key in SAME} for line in metrics(folder)]
    return found


def assert_whole(folder):
    """Every checkpoint that counts is whole."""
    for _, path in committed_steps(folder / "checkpoints"):
        assert damage(path) == []


@pytest.mark.parametrize("case", [case.parameter() for case in (*KILLED, *LEFT, *RAISED, *STOPPED)])
def test_a_rank_goes_wrong_and_a_resume_loses_nothing(case, here, whole, record_property):
    command = [*DYING, str(case.rank), case.place, case.how, *RUN, "--pp", str(case.ranks)]
    result = run_ranks(case.ranks, command, LIMIT, environment(), here)
    record_property("exit_code", result.returncode)
    assert result.returncode == case.code, result.tail()
    if case.code in (69, 70):
        assert f"rank {case.rank} of {case.ranks}" in one_block(result)[1]
    assert_whole(here / "run")
    resumed = mpipar(*RUN, "--pp", case.ranks, ranks=case.ranks, cwd=here)
    assert resumed.returncode == 0, resumed.tail()
    assert left_by(here / "run") == whole(case.ranks)


@pytest.mark.slow
@pytest.mark.shim
@pytest.mark.parametrize(("layout", "how", "code"), [
    ("pp=2", "kill", 69), ("dp=2", "kill", 69), ("pp=2", "raise", 70)])
def test_a_peer_over_nccl_goes_wrong_and_a_resume_without_gpus_goes_on(layout, how, code, here):
    """The other rank waits for a message, or for a sum, that NCCL will never bring."""
    run = [*RUN[:3], "--out", "run", *RUN[7:], "--layout", layout, "--dtype", "float64"]
    command = [*OVER_NCCL, "1", "forward", how, *run, "--device", "cuda"]
    result = run_ranks(2, command, LIMIT, environment(), here)
    assert result.returncode == code, result.tail()
    assert "messages are carried by NCCL" in result.stdout
    assert "rank 1 of 2" in one_block(result)[1]
    assert_whole(here / "run")
    resumed = mpipar(*run, "--device", "cpu", "--kernels", "numpy", ranks=2, cwd=here)
    assert resumed.returncode == 0, resumed.tail()
    assert [line["step"] for line in metrics(here / "run")] == list(range(1, 7))


LAUNCHER = [(28, signal.SIGTERM), (29, signal.SIGINT), (34, signal.SIGKILL)]


@pytest.mark.parametrize(("number", "sign"), [
    pytest.param(*one, marks=fault(one[0], f"{one[1].name} to the launcher", ANY))
    for one in LAUNCHER])
def test_a_signal_to_the_launcher_leaves_a_checkpoint_that_loads(
        number, sign, here, record_property):
    """Open MPI's launcher ends the ranks itself; a save that it cuts leaves the one before."""
    mark = f"fault-{os.getpid()}-{time.monotonic_ns()}"
    command = [find_launcher(), "-n", "2", *PROGRAM, *RUN, "--steps", "1000000"]
    with open(here / "output.txt", "w") as file:
        process = subprocess.Popen(command, cwd=here, stdout=file, stderr=file,
                                   env={**os.environ, **environment(), MARK: mark},
                                   start_new_session=True)
    try:
        deadline = time.monotonic() + LIMIT
        while len(committed_steps(here / "run" / "checkpoints")) < 2:
            assert process.poll() is None, (here / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(sign)
        code = process.wait(LIMIT)
        assert wait_for_end(mark) == []
    finally:
        kill_with(MARK, mark)
        process.wait()
    record_property("exit_code", code)
    assert code != 0
    assert_whole(here / "run")
    step = committed_steps(here / "run" / "checkpoints")[-1][0]
    resumed = mpipar(*RUN, "--steps", step + 2, ranks=2, cwd=here)
    assert resumed.returncode == 0, resumed.tail()
    assert [line["step"] for line in metrics(here / "run")] == list(range(1, step + 3))
