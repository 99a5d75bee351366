"""Drift, numbers that are not finite and failures during training, from the command line."""

import re

import pytest
from fault_table import fault
from helpers import run_ranks
from in_process import alone, assert_refused, refusal
from one_rank import fresh
from program import FAULTY, LIMIT, block_of, environment, metrics

from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.trace import trace_file
from mpipar.run.trace import tracer as tracer_module
from mpipar.run.trace.tracer import Tracer

SMALL = (
    "--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1"
    " --steps 6 --sample-tokens 0 --log-interval 1"
).split()


def faulty(name, code, *flags, folder, said=()):
    """The error block of a run of two ranks, which must say all of this."""
    command = [*FAULTY, name, "train", *SMALL, "--out", str(folder), *flags]
    return block_of(run_ranks(2, command, LIMIT, environment()), code, *said)


@pytest.mark.parametrize(("layout", "every", "step"), [
    pytest.param("dp=2", 4, 4, marks=fault(33, "one weight changes on one data-parallel copy", 76)),
    pytest.param("tp=2", 100, 6, marks=[
        pytest.mark.slow, fault(33, "one weight changes on one tensor-parallel copy", 76)]),
])  # fmt: skip
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


@pytest.mark.parametrize("layout", [
    pytest.param("dp=2", marks=[
        pytest.mark.slow, fault(32, "NaN in a gradient on one data-parallel rank", 79)]),
    pytest.param("pp=2", marks=[
        pytest.mark.slow, fault(32, "NaN in a gradient of one stage", 79)]),
    pytest.param("tp=2", marks=fault(32, "NaN in a gradient on one tensor-parallel rank", 79)),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_on_one_rank_ends_all(layout, tmp_path):
    folder = tmp_path / "run"
    block = faulty("nan", 79, "--layout", layout, folder=folder)
    assert re.search(
        r"step 3: loss \d\S*, gradient norm nan: stopped before the update; .*--lr", block
    )
    place = f"{layout[:2]}1"
    assert re.search(
        rf"gradient of \S+: 1 number is not finite, first \[.*\]: on rank 1 \({place}", block
    ), block
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert not (folder / "weights" / "model.safetensors").exists()


@fault(32, "NaN in a gradient of one island, between two meetings", 79)
def test_a_gradient_that_is_not_finite_in_one_island_ends_all(tmp_path):
    """The other island goes on until they would meet, and must not wait there."""
    folder, flags = tmp_path / "run", "--layout dp=2 --islands 2 --outer-interval 5"
    block = faulty("nan", 79, *flags.split(), folder=folder, said=["stopped before the update"])
    assert re.search(r"gradient of \S+: 1 number is not finite.*: on rank 1 \(island1\)", block)
    assert metrics(folder)[-1]["step"] < 5
    assert not list(folder.rglob("*.safetensors"))


@fault(32, "NaN in the loss, which the last stage alone sees", 79)
def test_a_loss_that_is_not_finite_on_the_last_stage_ends_all(tmp_path):
    folder = tmp_path / "run"
    said = ["step 3: loss nan, gradient norm ", "the loss of microbatch 0 is nan on rank 1 (pp1)"]
    faulty("nan-loss", 79, "--layout", "pp=2", folder=folder, said=said)
    assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert not list(folder.rglob("*.safetensors"))


def test_a_traced_run_that_failed_inside_says_so_when_its_trace_is_read(tmp_path):
    folder = tmp_path / "run"
    faulty("raise", 70, "--layout", "tp=2", "--trace", "2:4", folder=folder)
    assert (folder / "trace" / "meta.json").exists()
    parts = ["rank-00000.bin missing of 2 ranks; the run failed before", "ZeroDivisionError"]
    assert_refused(65, parts, "trace", folder)


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
    assert re.search(r"weights of \S+: \d+ numbers are not finite, first \[.*\]: on rank 0 ", block)
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
def test_a_trace_that_cannot_be_written_is_removed_and_said(
    function, error, monkeypatch, tmp_path, capsys, one_clock
):
    plain = getattr(trace_file, function)

    def write(*arguments):
        plain(*arguments)
        raise error

    monkeypatch.setattr(trace_file, function, write)
    tracer = traced_run(tmp_path, (2, 3))
    assert not tracer.written
    assert tracer.worker.recorder.capacity is not None, "the recorder keeps no more for ever"
    assert list(tmp_path.iterdir()) == []
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert "rank 0 cannot write its trace" in warnings[0]
    assert str(error) in warnings[0]


def test_a_run_folder_that_is_gone_costs_the_trace_alone(tmp_path, capsys, one_clock):
    assert not traced_run(tmp_path / "gone", (2, 2)).written
    assert "No such file or directory" in capsys.readouterr().err
    assert traced_run(tmp_path, (2, 9)).written, "the run stopped inside the traced steps"


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


def test_a_cut_file_of_a_rank_is_refused(tmp_path, one_clock):
    assert traced_run(tmp_path, (2, 2)).written
    path = tmp_path / trace_file.rank_name(0)
    path.write_text(path.read_text().replace('"rows": [0, ', '"rows": [7, '))
    assert "0 bytes of rows of 1,008: was it copied" in str(refusal("trace", tmp_path))
