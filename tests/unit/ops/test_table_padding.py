"""Vocabulary tables on a device with tensor cores: rows of zeros fill up every shard.

Tests marked gpu run on a GPU, and in CI on the CUDA machine: the real CuPy on a CPU.
"""

import numpy as np
import pytest
from config_helpers import changed

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.layers.stash import Batch
from mpipar.ops import make_for, shapes_for
from mpipar.train.optim import learning_rate
from mpipar.train.worker import Worker

ROWS = 128
VOCABULARY = 131  # odd, and with two ranks of tp the second holds three true rows
SHAPE = {
    "layers": 1,
    "d_model": 12,
    "heads": 2,
    "ffn": 20,
    "seq_len": 6,
    "batch_size": 4,
    "num_microbatches": 2,
    "vocab_size": VOCABULARY,
}


def configured(num_ranks=1, **settings):
    return resolve(changed(**SHAPE | settings), num_ranks)[0]


def tables_of(worker):
    return {
        param.name: param
        for stage in worker.stages.values()
        for param in stage.params
        if param.name.endswith(("tokens", "table"))
    }


@pytest.mark.parametrize("kernels", ["fused", "plain"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [10, VOCABULARY, 50257])
def test_shards_have_whole_tiles_of_rows_and_cover_the_table_once(vocabulary, tp, kernels):
    config = configured(
        tp,
        vocab_size=vocabulary,
        tp=tp,
        d_model=12 * tp,
        heads=2 * tp,
        dp=1,
        pp=1,
        device="cuda",
        kernels=kernels,
        dtype="bfloat16",
        tied=False,
    )
    covered = []
    for rank in range(tp):
        ops = shapes_for(config.run, Recorder())
        worker = Worker(config, Grid.of(config.grid, rank), ops, Recorder())
        tables = tables_of(worker)
        assert len(tables) == 2
        for param in tables.values():
            assert param.local_shape[0] % ROWS == 0
            assert param.local_shape[0] < -(-vocabulary // tp) + ROWS
            [named] = [one for _, one in worker.all_params if one.name == param.name]
            assert named.box_at(worker.grid, {"tp": rank}) == param.box
            assert param.shape[0] == vocabulary
        [(first, stop), _] = tables["head.table"].box
        covered += range(first, stop)
        logits = ops.matmul_nt(ops.empty((5, 12 * tp)), ops.empty(param.local_shape))
        assert logits.shape[-1] % 8 == 0  # its rows start at multiples of 16 bytes
    assert covered == [*range(vocabulary)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("dtype", "kernels"), [("float64", "plain"), ("bfloat16", "plain"), ("bfloat16", "fused")]
)
def test_rows_of_padding_stay_zero_and_change_nothing(cupy, dtype, kernels, optimizer):
    """Three steps with decay, on the device and on the CPU."""
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (3, 2, 2, 7))
    losses = {}
    for device in ("cpu", "cuda"):
        config = configured(
            device=device,
            dtype=dtype,
            optimizer=optimizer,
            weight_decay=0.1,
            kernels=kernels if device == "cuda" else "numpy",
        )
        ops = make_for(config.run)
        worker = Worker(config, Grid(0), ops, Recorder())
        worker.initialize()
        [table] = tables_of(worker).values()
        losses[device] = []
        for step, rows in enumerate(tokens, 1):
            loss, norm, _ = worker.gradients(step, [batch(ops, one) for one in rows].__getitem__)
            for kind in ("grad", "data", "master"):
                padding = ops.to_host(getattr(table, kind))[VOCABULARY:]
                assert padding.shape == ((2 * ROWS - VOCABULARY) * (device == "cuda"), 12)
                assert not padding.any(), kind
            worker.gradsync.clip(norm, config.train.clip)
            worker.optimizer.step(learning_rate(config.train, step), step)
            losses[device].append(loss)
        moments = [buffer for flat in worker.flats for buffer in flat.moments.values()]
        assert len(moments) == 2 * (optimizer == "adamw")
        assert all(np.isfinite(ops.to_host(one).astype(float)).all() for one in moments)
        assert not ops.to_host(table.master)[VOCABULARY:].any()
    close = 1e-12 if dtype == "float64" else 2e-4
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=close, abs=0)


def batch(ops, rows):
    """The Batch of some rows of tokens, one longer than what is read."""
    return Batch(
        *(
            ops.asarray(np.ascontiguousarray(one))
            for one in (rows[:, :-1], rows[:, 1:], np.arange(rows.shape[1] - 1))
        )
    )
