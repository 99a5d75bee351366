"""Deliberate attacks on a run: one rank goes wrong somewhere, and a resume loses nothing.

The numbers are those of the table in docs/failures.md. Other tests carry the mark `fault` as well.
"""

import signal
from dataclasses import dataclass

import pytest
from fault_table import fault
from helpers import run_ranks
from program import (
    FAULTY,
    LETTERS,
    LIMIT,
    PROGRAM,
    block_of,
    environment,
    killed_by,
    metrics,
    mpipar,
    running,
)

from mpipar.run.checkpoint.manifest import committed_steps, damage

RUN = """train --data text.txt --out run --pp 2 --layers 3 --d-model 8 --heads 2 --seq-len 5
    --batch-size 4 --num-microbatches 2 --steps 6 --save-interval 2 --sample-tokens 0
    --resume auto""".split()
SAME = "step loss grad_norm lr loss_scale skipped calls bytes".split()  # in each line of metrics
ANY = None  # the launcher's own code for ranks that were killed


@dataclass(frozen=True)
class Case:
    """A fault: its number, what happens, where (in faulty_run.py), to which rank, exit code."""

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
        return pytest.param(
            self,
            marks=marks + [pytest.mark.slow] * (not self.quick),
            id=f"{self.number}-{self.what}".replace(" ", "-"),
        )


KILLED = [
    Case(25, f"kill -9 of a rank: {place}", place, "kill", ANY, rank, quick=quick)
    for place, rank, quick in (
        ("init", 1, False),
        ("reading the data", 1, False),
        ("forward", 1, False),
        ("backward", 1, False),
        ("send", 1, False),
        ("receive", 1, False),
        ("all-reduce", 1, False),
        ("optimizer", 1, False),
        ("save", 1, False),
        ("commit", 0, True),
        ("evaluation", 1, False),
        ("finalize", 1, False),
    )
]
LEFT = [
    Case(
        42,
        f"a library ends a rank with exit code 0: {place}",
        place,
        "leave",
        code,
        rank,
        quick=quick,
    )
    for place, rank, quick, code in (
        ("init", 1, False, 70),
        ("forward", 1, True, 70),
        ("finalize", 0, False, ANY),  # Open MPI may end itself first, with its own error
    )
]
RAISED = [
    Case(26, f"exception in the {name} stage", "forward", "raise", 70, rank, 3)
    for rank, name in enumerate(("first", "middle", "last"))
]
STOPPED = [
    Case(27, "SIGUSR1 before the first step", "reading the data", "usr1", 75),
    Case(27, "SIGUSR1 to a rank", "forward", "usr1", 75, quick=True),
    Case(28, "SIGTERM to a rank", "backward", "term", 75),
    Case(41, "SIGHUP to a rank: its terminal was closed", "forward", "hangup", 75),
    Case(29, "Ctrl-C at a rank", "optimizer", "interrupt", 75),
    Case(27, "SIGUSR1 during a save", "save", "usr1", 75),
    Case(27, "SIGUSR1 after the last save", "evaluation", "usr1", 75),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function: number of ranks -> what a run leaves that nothing has interrupted."""
    done = {}

    def run(ranks):
        if ranks not in done:
            folder = tmp_path_factory.mktemp("whole")
            (folder / "text.txt").write_text(LETTERS)
            mpipar(*RUN, "--pp", ranks, ranks=ranks, cwd=folder).ended()
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
def test_a_rank_goes_wrong_and_a_resume_loses_nothing(case, text_folder, whole, record_property):
    command = [*FAULTY, f"{case.place}/{case.how}/{case.rank}", *RUN, "--pp", str(case.ranks)]
    result = run_ranks(case.ranks, command, LIMIT, environment(), text_folder)
    record_property("exit_code", result.returncode)
    if case.how == "kill":
        killed_by(result, signal.SIGKILL)
    elif case.code is ANY:
        assert result.returncode in (14, 70), result.tail()
    elif case.code == 70:
        block_of(result, 70, f"rank {case.rank} of {case.ranks}")
    else:
        result.ended(case.code)
    assert_whole(text_folder / "run")
    mpipar(*RUN, "--pp", case.ranks, ranks=case.ranks, cwd=text_folder).ended()
    assert left_by(text_folder / "run") == whole(case.ranks)


@pytest.mark.slow
@pytest.mark.shim
@pytest.mark.parametrize(
    ("layout", "how", "code"), [("pp=2", "kill", ANY), ("dp=2", "kill", ANY), ("pp=2", "raise", 70)]
)
def test_a_peer_over_nccl_goes_wrong_and_a_resume_without_gpus_goes_on(
    layout, how, code, text_folder
):
    """The other rank waits for a message, or for a sum, that NCCL will never bring."""
    run = [*RUN[:3], "--out", "run", *RUN[7:], "--layout", layout, "--dtype", "float64"]
    command = [*FAULTY, f"nccl/forward/{how}/1", *run, "--device", "cuda"]
    result = run_ranks(2, command, LIMIT, environment(), text_folder)
    assert "messages are carried by NCCL" in result.stdout
    if code is ANY:
        killed_by(result, signal.SIGKILL)
    else:
        assert "rank 1 of 2" in block_of(result, code)
    assert_whole(text_folder / "run")
    resumed = mpipar(*run, "--device", "cpu", "--kernels", "numpy", ranks=2, cwd=text_folder)
    assert resumed.returncode == 0, resumed.tail()
    assert [line["step"] for line in metrics(text_folder / "run")] == list(range(1, 7))


LAUNCHER = [(28, signal.SIGTERM), (29, signal.SIGINT), (34, signal.SIGKILL)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "sign"),
    [
        pytest.param(*one, marks=fault(one[0], f"{one[1].name} to the launcher", ANY))
        for one in LAUNCHER
    ],
)
def test_a_signal_to_the_launcher_leaves_a_checkpoint_that_loads(
    number, sign, text_folder, record_property
):
    """Open MPI's launcher ends the ranks itself; a save that it cuts leaves the one before."""
    with running([*PROGRAM, *RUN, "--steps", "1000000"], text_folder, 2) as job:
        job.wait_until(lambda: len(committed_steps(text_folder / "run" / "checkpoints")) > 1)
        code = job.interrupt(sign)
    record_property("exit_code", code)
    assert code != 0
    assert_whole(text_folder / "run")
    step = committed_steps(text_folder / "run" / "checkpoints")[-1][0]
    mpipar(*RUN, "--steps", step + 2, ranks=2, cwd=text_folder).ended()
    assert [line["step"] for line in metrics(text_folder / "run")] == list(range(1, step + 3))
