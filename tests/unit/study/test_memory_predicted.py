"""Predicted bytes of arrays compared with measured ones, for every kind of CPU kernels."""

import importlib.util

import pytest

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.config.train import OPTIMIZERS
from mpipar.ops.shape_ops import Ledger
from mpipar.run.console.metrics import PeakMemory
from mpipar.run.data import rows
from mpipar.study.explain.predict import predict
from mpipar.train.worker import Worker

SHARE, LEAST_BYTES = 0.05, 1 << 20  # the larger of the two is how far a prediction may be off
TINY = {"dp": 1, "pp": 1, "tp": 1, "batch_size": 16, "num_microbatches": 4}
WIDE = TINY | {"layers": 2, "d_model": 256, "heads": 8, "seq_len": 128}
CASES = {
    **{name: TINY | {"optimizer": name} for name in OPTIMIZERS},
    "rms": TINY | {"norm": "rms"},
    "wide": WIDE,
    "recompute": WIDE | {"recompute": "block"},
    "bfloat16": TINY | {"dtype": "bfloat16"},
    "llama": TINY | {"arch": "llama"},
    "long": TINY | {"layers": 1, "seq_len": 512, "batch_size": 4},
}


def measured(config) -> PeakMemory:
    """The memory of a worker's first two steps."""
    ops = ops_module.make_for(config.run)
    memory = PeakMemory(ops)
    memory.start()
    worker = Worker(config, Grid.of(config.grid, 0), ops, Recorder())
    worker.initialize()
    blank_batch = rows.blank_batch
    for step in (1, 2):
        worker.train_step(step, lambda mb: blank_batch(ops, config))
        assert memory.after_step(step == 2)
    assert not memory.after_step(True)
    return memory


USUAL = {(case, "numpy") for case in (*OPTIMIZERS, "long")}


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        pytest.param(case, kernels, marks=() if (case, kernels) in USUAL else pytest.mark.slow)
        for case in CASES
        for kernels in ops_module.KERNELS["cpu"]
    ],
)
def test_predicted_peak_is_the_measured_one(case, kernels):
    """Python's objects and those of Numba's compiler do not count."""
    if kernels == "numba" and not importlib.util.find_spec("numba"):
        pytest.skip("needs the extra cpu: Numba")
    config, _ = resolve(build(CASES[case] | {"kernels": kernels}), 1)
    predicted, found = predict(config, 0).peak_total, measured(config)
    assert abs(found.peak - predicted) <= max(SHARE * predicted, LEAST_BYTES), (
        f"predicted {predicted / 2**20:.2f} MiB, measured {found.peak / 2**20:.2f} MiB"
    )


# Two blocks of which one pass of a simulated device takes seconds.
ON_GPU = {
    "dp": 1,
    "pp": 1,
    "tp": 1,
    "layers": 2,
    "d_model": 64,
    "heads": 2,
    "seq_len": 32,
    "batch_size": 8,
    "num_microbatches": 2,
    "device": "cuda",
}


GPU_CASES = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "logits": {"vocab_size": 4999},
    "long": {"layers": 1, "seq_len": 256},
    "recompute": {"recompute": "block"},
    "llama": {"arch": "llama"},
}


def lent(config) -> int:
    """The largest sum of bytes that CuPy's pool lends; it holds more where no free piece fits."""
    from cupy.cuda import MemoryHook

    class Lent(MemoryHook):
        name = "lent"
        sizes, now, peak = {}, 0, 0

        def malloc_postprocess(self, *, mem_size, pmem_id, **_):
            self.sizes[pmem_id] = mem_size
            self.now += mem_size
            self.peak = max(self.peak, self.now)

        def free_postprocess(self, *, pmem_id, **_):
            self.now -= self.sizes.pop(pmem_id, 0)

    with Lent() as found:
        measured(config)
    return found.peak


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_fused_kernels_take_the_predicted_memory(case, dtype):
    config, _ = resolve(build(ON_GPU | GPU_CASES[case] | {"dtype": dtype}), 1)
    assert abs(lent(config) / predict(config, 0).peak_total - 1) <= SHARE


@pytest.mark.gpu
def test_a_prediction_without_logits_is_caught(monkeypatch):
    """The broken twin: one array of the size of a microbatch's logits is forgotten."""
    config, _ = resolve(build(ON_GPU | GPU_CASES["logits"]), 1)
    rows = config.train.batch_size // config.grid.num_microbatches * config.model.seq_len
    plain, found = Ledger.add, lent(config)
    forgotten = []

    def add(self, label, nbytes):
        width = abs(nbytes) / rows / 4  # a table may be padded
        if config.model.vocab_size <= width < config.model.vocab_size + 256:
            forgotten.append(nbytes)
        else:
            plain(self, label, nbytes)

    monkeypatch.setattr(Ledger, "add", add)
    predicted = predict(config, 0).peak_total
    assert forgotten
    assert abs(found / predicted - 1) > SHARE
