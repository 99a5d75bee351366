"""A decoder of odd, unequal sizes, and the comparison of a layout with one rank."""

import functools
import os
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from config_helpers import changed
from mpi4py import MPI

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Options
from mpipar.config.model import ModelConfig
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.run.checks import train_step
from mpipar.run.console.metrics import PeakMemory
from mpipar.run.data import rows
from mpipar.run.verify import compare_with_one_rank, one_rank_tensors, serial_config, step_tensors
from mpipar.study.explain.predict import predict
from mpipar.train.worker import Worker

WORLD = MPI.COMM_WORLD
LAYOUTS = {  # number of ranks: (dp, pp, tp)
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(1, 1, 3)],
    4: [(1, 4, 1), (1, 2, 2), (2, 2, 1), (2, 1, 2)],
    8: [(2, 2, 2)],
}
# Stages that hold only the first layer, only the head, or nothing: (schedule, blocks by stage).
EMPTY_STAGES = [
    ("1f1b", (0, 5)),
    ("1f1b", (5, 0)),
    ("zb-v", (0, 3, 2, 0)),
    ("zb-v", (3, 0, 0, 2)),
    ("interleaved", (2, 0, 0, 3)),
    ("v-min", (0, 0, 5, 0)),
    ("dualpipe-v", (0, 5, 0, 0)),
]
# 6 heads of width 3, 5 layers, 7 tokens; ffn 31 and 29 tokens in the vocabulary: padded for every
# tp > 1.
MODEL = ModelConfig(layers=5, d_model=18, heads=6, ffn=31, seq_len=7, vocab_size=29)
EVEN = replace(MODEL, seq_len=8)  # tokens that context parallelism can share out
EXPERTS = replace(EVEN, layers=2, experts=4, expert_ffn=13, router_loss_coef=0.5)
DP, PP, TP = LAYOUTS[2]


def small_config(
    layout=(1, 1, 1), num_microbatches=2, model=MODEL, rows_per_mb=2, **values
) -> Config:
    """A resolved float64, plain-SGD configuration for (dp, pp, tp), with values of any fields."""
    dp, pp, tp = layout
    config = Config(
        model=model,
        train=TrainConfig(
            batch_size=10 * 2 * rows_per_mb, optimizer="sgd", lr=0.1, bucket_bytes=999
        ),
        run=RunConfig(dtype="float64", seed=3),
    )
    config = changed(config, dp=dp, pp=pp, tp=tp, num_microbatches=num_microbatches, **values)
    return resolve(config, dp * pp * tp * config.grid.cp)[0]


@functools.cache
def tokens():
    """Random tokens of the small vocabulary, the same on every rank."""
    return np.random.default_rng(7).integers(0, MODEL.vocab_size, 2000).astype(np.uint8)


def poison_unwritten(monkeypatch) -> None:
    """Fill every array that ops.empty hands out with NaN."""

    def empty(plain, *given, **named):
        x = plain(*given, **named)
        if x.dtype.kind in "fV":  # NumPy knows bfloat16 as "void"
            x.fill(float("nan"))
        return x

    plant(monkeypatch, NumpyOps, "empty", empty)


def cpu(dtype="float64"):
    return ops_module.make("cpu", dtype)


def comms_of(ops=None, recorder=None, axes=None, **options) -> Comms:
    """The groups of all ranks: one along dp, or those of some axes. Comm: makes them."""
    return Comms(
        Grid(WORLD.rank, axes or {"dp": WORLD.size}),
        ops or cpu(),
        recorder or Recorder(),
        WORLD,
        Options(**options),
    )


def worker_of(config, *, alone=False, ops=None, recorder=None) -> Worker:
    """This rank's part of the layout, or the whole model in this process. Comm: makes the groups.

    ops: on the CPU by default.
    """
    grid = Grid(0) if alone else Grid.of(config.grid, WORLD.rank)
    return Worker(
        serial_config(config) if alone else config,
        grid,
        ops or cpu(config.run.dtype),
        recorder or Recorder(),
        None if alone else WORLD,
    )


def rows_of(worker, part=None):
    """What a worker trains on or is judged by: the random tokens by default."""
    return rows.Rows(worker.ops, tokens() if part is None else part, worker.config, worker.grid)


def worker_and_rows(config, *, spread=0.0, part=None, **made):
    """`worker_of` with its initial values, and `rows_of` it."""
    worker = worker_of(config, **made)
    worker.initialize(spread)
    return worker, rows_of(worker, part)


def worker_and_step(config):
    """This rank's Worker with its initial values, and a function: step -> StepResult."""
    worker, rows = worker_and_rows(config)
    return worker, lambda step: train_step(worker, step, lambda mb: rows.train(step, mb))


def two_workers(config):
    """This rank's part of the layout, and the whole model in this process."""
    made = worker_of(config), worker_of(config, alone=True)
    for worker in made:
        worker.initialize()
    return made


def on_all_ranks(problem: str) -> None:
    """Raise AssertionError on every rank if there is a problem on any. Comm: one all-gather."""
    found = [text for text in WORLD.allgather(problem) if text]
    assert not found, found[0]


def raised_everywhere(error_class, call) -> str:
    """Return the message of an error that every rank must raise. Comm: two all-gathers."""
    try:
        call()
    except error_class as error:
        text = str(error)
    else:
        text = ""
    on_all_ranks("" if text else f"rank {WORLD.rank} raised nothing")
    texts = WORLD.allgather(text)
    assert set(texts) == {text}
    return text


def real_step(config, part=None):
    """One training step of this rank; returns its worker and recorder.

    Before each collective the ranks agree that they make the same call. Tests that compare numbers
    alone do without, as runs do: this agreement took a third of the time of a session of four.
    """
    config = replace(config, run=replace(config.run, check_comm=True))
    recorder = Recorder(1 << 16)
    worker, rows = worker_and_rows(config, part=part, recorder=recorder)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    worker.close()
    return worker, recorder


def peaks(config) -> tuple[int, int]:
    """Measured and predicted peak bytes of this rank's arrays in a step."""
    predicted, peak = predict(config, WORLD.rank).peak_total, PeakMemory(cpu(config.run.dtype))
    peak.start()
    real_step(config)
    peak.stop()
    return peak.peak, predicted


def assert_peak(measured: int, predicted: int) -> None:
    """Assert what `peaks` returned: within 5 %, and 2 MiB for tile buffers and Python's objects."""
    assert 0.95 * predicted <= measured <= 1.05 * predicted + 2**21, (measured, predicted)


def assert_saved(whole: tuple[int, int], less: tuple[int, int], under_way: int = 0) -> None:
    """Assert that the measured peak falls by the predicted bytes, to 5 % or 1 MiB.

    whole, less: what `peaks` returned. The larger of the two tolerances counts. under_way: bytes of
    a message between stages; a rank that is late has one more in memory.
    """
    measured, predicted = (a - b for a, b in zip(whole, less, strict=True))
    assert predicted > 1 << 20
    assert abs(measured - predicted) <= max(0.05 * predicted, 1 << 20) + under_way, (
        measured,
        predicted,
    )


@functools.cache
def _step_on_one_rank(config):
    return step_tensors(config, tokens(), Grid(0))


def computed_once(config, part):
    """One rank's tensors, kept for every layout, schedule and cut of a model.

    A test that changes a function must not use it: other tests would get its results.
    """
    assert part is tokens()
    serial = serial_config(config)
    model = replace(serial.model, sequence_parallel=False, tp_matmul="plain", ffn_cut="pair")
    run = replace(serial.run, all_reduce="mpi")
    return _step_on_one_rank(replace(serial, model=model, run=run))


def assert_equals_one_rank(config: Config, part=None, expected=one_rank_tensors) -> None:
    """Assert that loss, norm, every gradient and every weight after a step equal those of one rank.

    part: what is trained on; the random tokens by default. expected: gives one rank's tensors.
    World rank 0 decides, and all ranks raise with it. Comm: a step, two streams, a broadcast.
    """
    found = compare_with_one_rank(config, tokens() if part is None else part, WORLD, expected)
    bad = [f"{d.kind} of {d.name}: {d.error:.1e} at {d.where}" for d in found if not d.ok]
    count = np.array([len(bad)])
    WORLD.Bcast(count)
    assert not count[0], f"{config.grid}: {count[0]} tensors differ, e.g. {bad[:5]}"


def assert_equals_known(config: Config) -> None:
    """`assert_equals_one_rank` with synchronous sends; its tensors are kept: see `computed_once`.

    A send is then done only when it is matched, so code that relies on buffering hangs.
    """
    with mock.patch.dict(os.environ, MPIPAR_SYNC_SENDS="1"):
        assert_equals_one_rank(config, expected=computed_once)


def assert_records_predicted(config: Config, part=None):
    """Take a step, which must leave the records of the shapes-only one, but for their times.

    Return its worker, its recorder and the Prediction. What experts get depends on numbers: there
    the sizes may differ. Comm: a step's.
    """

    def known(one):
        by_numbers = one.operation == "all_to_allv" and one.axis != "muon"
        return (one._replace(payload_bytes=0, wire_bytes=0) if by_numbers else one)[3:]

    worker, recorder = real_step(config, part)
    predicted = predict(config, WORLD.rank)
    assert list(map(known, recorder.records)) == list(map(known, predicted.recorder.records))
    real, foreseen = (
        {
            key: sums[: 1 if key.operation == "all_to_allv" else 3]
            for key, sums in one.counters.items()
        }
        for one in (recorder, predicted.recorder)
    )
    assert real == foreseen
    return worker, recorder, predicted


def plant(monkeypatch, owner, name, twin) -> None:
    """Plant a bug: owner.name(...) becomes twin(plain, ...), where plain is what it was."""
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: twin(plain, *given, **named))


def called(value) -> str:
    """The text of a parameter in a test's name: a function or class by its own name."""
    return getattr(value, "__name__", str(value))


def assert_caught(config: Config, expected=one_rank_tensors, match="tensors differ") -> None:
    """Assert that the comparison with one rank fails. Comm: `assert_equals_one_rank`."""
    with pytest.raises(AssertionError, match=match):
        assert_equals_one_rank(config, expected=expected)


def slow_unless(chosen, cases):
    """The cases as parameters; those that chosen(*case) does not name are for the slow sessions."""
    return [pytest.param(*case, marks=() if chosen(*case) else pytest.mark.slow) for case in cases]


def last(layouts):
    """On four ranks and more the last layout; the others are for the slow sessions."""
    return [
        pytest.param(one, marks=pytest.mark.slow if WORLD.size > 3 and one != layouts[-1] else ())
        for one in layouts
    ]


def cut_model(tp_matmul="plain", **changes) -> ModelConfig:
    """The small decoder with --sequence-parallel."""
    return replace(MODEL, sequence_parallel=True, tp_matmul=tp_matmul, **changes)
