"""Deliberate attacks on a run: one rank or number goes wrong, and a resume loses nothing.

Other tests of faults carry the mark `fault` as well.
"""

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import run_ranks
from in_process import alone
from one_rank import fresh
from program import (
    FAULTY,
    LETTERS,
    LIMIT,
    PROGRAM,
    block_of,
    environment,
    flip,
    killed_by,
    metrics,
    mpipar,
    one_block,
    running,
)

from mpipar.run.checkpoint import manifest
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps, damage
from mpipar.run.trace import trace_file
from mpipar.run.trace import tracer as tracer_module
from mpipar.run.trace.tracer import Tracer

RUN = """train --data text.txt --out run --pp 2 --layers 3 --d-model 8 --heads 2 --seq-len 5
    --batch-size 4 --num-microbatches 2 --steps 6 --save-interval 2 --sample-tokens 0
    --resume auto""".split()
SAME = "step loss grad_norm lr loss_scale skipped calls bytes".split()  # in each line of metrics
ANY = None  # the launcher's own code for ranks that were killed


@dataclass(frozen=True)
class Case:
    """A fault: what happens, where (in faulty_run.py), to which rank, exit code."""

    what: str
    place: str
    how: str
    code: int
    rank: int = 1
    ranks: int = 2
    quick: bool = False

    def parameter(self):
        return pytest.param(
            self,
            marks=[pytest.mark.slow] * (not self.quick),
            id=self.what.replace(" ", "-"),
        )


PLACES = (
    "init", "reading the data", "forward", "backward", "send", "receive", "all-reduce",
    "optimizer", "save", "commit", "evaluation", "finalize",
)  # fmt: skip
KILLED = [
    Case(f"kill -9 of a rank: {place}", place, "kill", ANY, int(place != "commit"),
         quick=place == "commit")
    for place in PLACES
]  # fmt: skip
EXITS = "a library ends a rank with exit code 0"
LEFT = [
    Case(f"{EXITS}: init", "init", "leave", 70),
    Case(f"{EXITS}: forward", "forward", "leave", 70, quick=True),
    # Open MPI may end itself first, with its own error
    Case(f"{EXITS}: finalize", "finalize", "leave", ANY, 0),
]
RAISED = [
    Case(f"exception in the {name} stage", "forward", "raise", 70, rank, 3)
    for rank, name in enumerate(("first", "middle", "last"))
]
STOPPED = [
    Case("SIGUSR1 before the first step", "reading the data", "usr1", 75),
    Case("SIGUSR1 to a rank", "forward", "usr1", 75),
    Case("SIGTERM to a rank", "backward", "term", 75),
    Case("SIGHUP to a rank: its terminal was closed", "forward", "hangup", 75),
    Case("Ctrl-C at a rank", "optimizer", "interrupt", 75),
    Case("SIGUSR1 during a save", "save", "usr1", 75),
    Case("SIGUSR1 after the last save", "evaluation", "usr1", 75),
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


@pytest.mark.fault
@pytest.mark.parametrize("case", [case.parameter() for case in (*KILLED, *LEFT, *RAISED, *STOPPED)])
def test_a_rank_goes_wrong_and_a_resume_loses_nothing(case, text_folder, whole):
    command = [*FAULTY, f"{case.place}/{case.how}/{case.rank}", *RUN, "--pp", str(case.ranks)]
    result = run_ranks(case.ranks, command, LIMIT, environment(), text_folder)
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


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_a_checkpoint_that_loads(sign, text_folder):
    """Open MPI's launcher ends the ranks itself; a save that it cuts leaves the one before."""
    with running([*PROGRAM, *RUN, "--steps", "1000000"], text_folder, 2) as job:
        job.wait_until(lambda: len(committed_steps(text_folder / "run" / "checkpoints")) > 1)
        code = job.interrupt(sign)
    assert code != 0
    assert_whole(text_folder / "run")
    step = committed_steps(text_folder / "run" / "checkpoints")[-1][0]
    mpipar(*RUN, "--steps", step + 2, ranks=2, cwd=text_folder).ended()
    assert [line["step"] for line in metrics(text_folder / "run")] == list(range(1, step + 3))


# --- numbers that are wrong, and traces that cannot be written


SMALL = (
    "--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1"
    " --steps 6 --sample-tokens 0 --log-interval 1"
).split()


def faulty(name, code, *flags, folder, said=()):
    """The error block of a run of two ranks, which must say all of this."""
    command = [*FAULTY, name, "train", *SMALL, "--out", str(folder), *flags]
    return block_of(run_ranks(2, command, LIMIT, environment()), code, *said)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("layout", "every", "step"),
    [("dp=2", 4, 4), pytest.param("tp=2", 100, 6, marks=pytest.mark.slow)],
)
def test_a_weight_that_changes_on_one_copy_is_found_before_the_last_save(
    layout, every, step, tmp_path
):
    """The last of the buffer: a bias of the embedding with dp, of a norm with tp."""
    folder = tmp_path / "run"
    flags = ["--layout", layout, "--check-replicas", str(every)]
    said = [f"step {step}: copies of tensors differ that must be equal bit by bit"]
    block = faulty("drift", 76, *flags, folder=folder, said=said)
    assert re.search(r"(weights|first moment) of \S+: rank 0 unlike rank 1", block), block
    assert [line["step"] for line in metrics(folder)] == list(range(1, step + 1))
    assert not (folder / "weights" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_weight_that_is_loaded_otherwise_on_one_copy_is_found_before_the_first_step(tmp_path):
    checkpoint.save(fresh(layers=2, d_model=16, heads=2, seq_len=8, vocab_size=256), tmp_path / "m")
    folder = tmp_path / "run"
    flags = ["--layout", "dp=2", "--init-from", str(tmp_path / "m")]
    faulty("loaded", 76, *flags, folder=folder, said=["step 0: copies of tensors differ"])
    assert not (folder / "metrics.jsonl").read_text()


@pytest.mark.fault
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp=2", marks=pytest.mark.slow),
        pytest.param("pp=2", marks=pytest.mark.slow),
        "tp=2",
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_ends_all(layout, tmp_path):
    folder = tmp_path / "run"
    block = faulty("nan", 79, "--layout", layout, folder=folder)
    assert re.search(
        r"step 3: loss \d\S*, gradient norm nan: stopped before the update; .*--lr", block
    )
    place = f"{layout[:2]}1"
    assert re.search(rf"gradient of \S+ is not finite on rank 1 \({place}", block), block
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert not (folder / "weights" / "model.safetensors").exists()


@pytest.mark.fault
def test_a_gradient_that_is_not_finite_in_one_island_ends_all(tmp_path):
    """The other island goes on until they would meet, and must not wait there."""
    folder, flags = tmp_path / "run", "--layout dp=2 --islands 2 --outer-interval 5"
    block = faulty("nan", 79, *flags.split(), folder=folder, said=["stopped before the update"])
    assert re.search(r"gradient of \S+ is not finite on rank 1 \(island1\)", block)
    assert metrics(folder)[-1]["step"] < 5
    assert not list(folder.rglob("*.safetensors"))


@pytest.mark.fault
def test_a_loss_that_is_not_finite_on_the_last_stage_ends_all(tmp_path):
    folder = tmp_path / "run"
    said = ["step 3: loss nan, gradient norm ", "the loss of microbatch 0 is nan on rank 1 (pp1)"]
    faulty("nan-loss", 79, "--layout", "pp=2", folder=folder, said=said)
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert not list(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("interval", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_weights_that_an_update_ruined_are_not_saved(interval, tmp_path):
    """Otherwise the newest checkpoint, from which a run resumes, would be useless."""
    folder = tmp_path / "run"
    flags = "--optimizer sgd --lr 1e300 --clip 0 --warmup-steps 0 --save-interval".split()
    block = faulty(
        "none",
        79,
        "--layout",
        "tp=2",
        *flags,
        interval,
        "--steps",
        "1" if interval == "0" else "3",
        folder=folder,
        said=["step 1: the update produced weights that are not finite: not saved"],
    )
    assert re.search(r"weights of \S+ is not finite on rank 0 ", block)
    assert [line["step"] for line in metrics(folder)] == [1]
    assert not list(folder.rglob("*.safetensors"))


# --- one rank, in this process


def test_a_step_that_fails_while_it_is_saved_is_in_the_report(tmp_path):
    flags = "--optimizer sgd --lr 1e300 --clip 0 --warmup-steps 0 --save-interval 1".split()
    folder = tmp_path / "run"
    assert alone("train", *SMALL, *flags, "--out", folder).returncode == 79
    assert "failed in step 1 of 6" in (folder / "report.html").read_text()


@pytest.fixture
def one_clock(monkeypatch):
    """A Tracer without MPI: one rank and its clock."""
    monkeypatch.setattr(tracer_module, "shared_clocks", lambda world, identity: [0])
    monkeypatch.setattr(tracer_module, "measure_clocks", lambda world, owners: {})


def traced_run(folder, trace, steps=3):
    """Three steps of one rank with a trace; returns the Tracer."""
    worker = fresh()
    tracer = Tracer(worker, None, folder, trace)
    for step in range(1, steps + 1):
        with tracer.step(step):
            worker.recorder.step = step
    tracer.finish()
    return tracer


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), MemoryError(), TypeError("not JSON serializable")],
    ids=repr,
)
@pytest.mark.parametrize("function", ["write_rank", "write_meta"])
def test_a_trace_that_cannot_be_written_is_said(
    function, error, monkeypatch, tmp_path, capsys, one_clock
):
    plain = getattr(trace_file, function)

    def write(*arguments):
        plain(*arguments)
        raise error

    monkeypatch.setattr(trace_file, function, write)
    tracer = traced_run(tmp_path, (2, 3))
    assert not tracer.written
    assert tracer.worker.recorder.entries.maxlen is not None, "the recorder keeps no more for ever"
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert "rank 0 cannot write its trace" in warnings[0]
    assert str(error) in warnings[0]


def test_a_trace_that_cannot_be_written_does_not_hide_the_error(
    monkeypatch, tmp_path, capsys, one_clock
):
    def write(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_file, "write_rank", write)
    tracer = Tracer(fresh(), None, tmp_path, (1, 1))
    with pytest.raises(ZeroDivisionError), tracer.step(1):
        raise ZeroDivisionError
    assert "cannot write the trace: [Errno 28]" in capsys.readouterr().err


# --- faults at start-up: flags, data, the run folder, checkpoints; each with real ranks


START = """train --pp 2 --layers 3 --d-model 8 --heads 2 --seq-len 5 --batch-size 4
    --num-microbatches 2 --steps 4 --save-interval 2 --sample-tokens 0""".split()
ON = "--out run --resume auto --steps 6"  # go on in the run that is there
BY_PATH = "--resume run --steps 6"
LLMC, HELLASWAG = (20240520, 1), (20240522, 1)


@dataclass(frozen=True)
class Start:
    """A fault: what it is, flags, exit code, what is said, and what happens before."""

    what: str
    words: str
    code: int
    said: str
    before: Callable = lambda folder: None
    ranks: int | None = 2


def tokens(*ids, magic=None, count=None):
    """A function that writes a token file; count: what its header says."""

    def write(folder: Path):
        head = b"" if magic is None else np.array([*magic, count, *[0] * 253], "<i4").tobytes()
        (folder / "ids.bin").write_bytes(head + np.array(ids, "<u2").tobytes())

    return write


def newest(folder, name):
    return folder / "run" / "checkpoints" / "step-00000004" / name


def cut(folder):
    path = newest(folder, "pieces-00001.safetensors")
    path.write_bytes(path.read_bytes()[:-5])


def edit_manifest(edit):
    """A function that changes a value of the manifest, and its own digest."""

    def change(folder):
        path = newest(folder, "manifest.json")
        content = json.loads(path.read_text())
        del content["sha256"]
        edit(content)
        path.write_text(json.dumps(content | {"sha256": manifest._digest(content)}))

    return change


def steal_piece(content):
    content["files"]["../../../text.txt"] = content["files"].pop("pieces-00001.safetensors")


STARTS = (
    Start("the layout needs another number of ranks", "--pp 4", 2, "on 2 ranks"),
    Start(
        "heads, widths and layers that cannot be cut",
        "--pp 1 --tp 2 --heads 1 --ffn 7",
        2,
        "--heads 1 with --tp 2",
    ),
    Start("a misspelt flag", "--stepps 4", 2, "did you mean --steps?"),
    Start("a learning rate that is NaN", "--lr nan", 2, "finite"),
    Start("a batch that cannot be cut", "--batch-size 3", 2, "--batch-size 3"),
    Start("no microbatch", "--num-microbatches 0", 2, "--num-microbatches 0"),
    Start(
        "fewer microbatches than stages: the bubble is shown",
        "--num-microbatches 1",
        0,
        "bubble",
    ),
    Start("the run folder exists", "--out run", 2, "--resume auto"),
    Start("the run folder cannot be made", "--out text.txt/run", 74, "text.txt/run"),
    Start("the run folder cannot be written", "--out /proc/run", 74, "/proc/run"),
    Start("no such data", "--data nowhere.txt", 65, "nowhere.txt: no such file"),
    Start(
        "an empty file as data",
        "--data empty.txt",
        65,
        "is empty",
        lambda folder: (folder / "empty.txt").touch(),
    ),
    Start(
        "tokens of another format",
        "--data ids.bin",
        65,
        "llm.c's format 20240522",
        tokens(1, 2, 3, magic=HELLASWAG, count=3),
    ),
    Start(
        "fewer tokens than the header says",
        "--data ids.bin",
        65,
        "9 tokens",
        tokens(1, 2, magic=LLMC, count=9),
    ),
    Start(
        "a token outside the vocabulary",
        "--data ids.bin",
        65,
        "token 300 is outside",
        tokens(*[7, 300, 8] * 100),
    ),
    Start("less data than two rows", "--seq-len 4000", 65, "fewer than one row to train on"),
    Start(
        "data that changed since the save",
        ON,
        65,
        "has changed since",
        lambda folder: (folder / "text.txt").write_text(LETTERS.replace("again", "often")),
    ),
    Start(
        "a truncated file: --resume auto takes the checkpoint before",
        ON,
        0,
        "pieces-00001.safetensors",
        cut,
    ),
    Start("a truncated file: --resume PATH", BY_PATH, 65, "pieces-00001.safetensors", cut),
    Start(
        "a flipped bit of a tensor",
        BY_PATH,
        65,
        "pieces-00001.safetensors",
        lambda folder: flip(newest(folder, "pieces-00001.safetensors"), 0.9),
    ),
    Start(
        "a flipped bit of a file's header",
        BY_PATH,
        65,
        "pieces-00001.safetensors",
        lambda folder: flip(newest(folder, "pieces-00001.safetensors"), 0.01),
    ),
    Start(
        "a flipped bit of the manifest",
        BY_PATH,
        65,
        "manifest.json",
        lambda folder: flip(newest(folder, "manifest.json")),
    ),
    Start(
        "a missing file",
        BY_PATH,
        65,
        "pieces-00000.safetensors",
        lambda folder: newest(folder, "pieces-00000.safetensors").unlink(),
    ),
    Start("another layout", f"{ON} --pp 1 --tp 2", 0, "step 6/6"),
    Start("another model", f"{ON} --d-model 16", 2, "which has 8"),
    Start(
        "a manifest that names a file outside",
        BY_PATH,
        65,
        "text.txt: has no bytes",
        edit_manifest(steal_piece),
    ),
    Start(
        "a checkpoint of a newer format",
        BY_PATH,
        65,
        "format",
        edit_manifest(lambda content: content.update(format=99)),
    ),
    Start("several ranks are needed, and no launcher is there", "", 2, "mpiexec -n 2", ranks=None),
    Start("no GPU, or no CuPy", "--device cuda", 69, "--device cuda"),
)


@pytest.fixture(scope="module")
def folder_of_a_run(tmp_path_factory):
    """A folder with a text and a finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text(LETTERS)
    mpipar(*START, "--data", "text.txt", "--out", "run", ranks=2, cwd=folder).ended()
    return folder


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    "start",
    [pytest.param(one, id=one.what.replace(" ", "-")) for one in STARTS],
)
def test_a_start_with_a_fault(start, folder_of_a_run, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(folder_of_a_run, here)
    start.before(here)
    before = metrics(here / "run")
    words = start.words.split()
    data = [] if {"--data", "--resume"} & {*words} else ["--data", "text.txt"]
    result = mpipar(*START, *data, *words, ranks=start.ranks, cwd=here)
    if start.code:
        code, block = one_block(result)
        assert (code, start.said in block) == (start.code, True), result.tail()
        assert "Traceback" not in result.stderr
        assert metrics(here / "run") == before, "a refused start changes nothing"
        assert not (here / "runs").exists()
    else:
        assert result.returncode == 0, result.tail()
        assert start.said in result.stdout, result.tail()
