"""Files of Llama and its kin, and of mpipar's own form, on every layout; ranks share kv heads."""

import numpy as np
import pytest
from small_model import LAYOUTS, WORLD, small_config

from mpipar import ops as ops_module
from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.model import model_config
from mpipar.train.verify import serial_config
from mpipar.train.worker import Worker

# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
SHAPE = {"layers": 4, "d_model": 16, "heads": 8, "head_dim": 6, "ffn": 31, "seq_len": 16,
         "vocab_size": 29}
ARCHS = {"llama": {"kv_heads": 2, "bias": "all"}, "mistral": {"kv_heads": 4},
         "qwen2": {"kv_heads": 1, "tied": True}, "mixtral": {"kv_heads": 2, "experts": 4},
         "gpt2": {"norm": "rms"}}  # mpipar's own form, whose files have all axes of the tensors
HERE = {2: LAYOUTS[2], 4: [(1, 2, 2), (1, 1, 4)]}.get(WORLD.size, [])  # the last: tp above kv heads
OTHERS_HERE = {4: [(2, 1, 2)]}.get(WORLD.size, [])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("layout", "arch"), [
    *((layout, arch) for layout in HERE for arch in ARCHS),
    *((layout, arch) for layout in OTHERS_HERE for arch in ("mixtral", "gpt2"))], ids=str)
def test_every_layout_writes_and_reads_the_same_bytes(layout, arch, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 300)
    model = model_config({"arch": arch} | SHAPE | ARCHS[arch])
    config = small_config(layout, model=model, ep=layout[0] if model.experts else 1)
    worker, again = (Worker(config, Grid.of(config.grid, WORLD.rank),
                            ops_module.make("cpu", "float64"), Recorder(), WORLD)
                     for _ in range(2))
    worker.initialize(0.5)
    checkpoint.save(worker, folder / "here")
    WORLD.Barrier()
    checkpoint.load(again, str(folder / "here"))
    for flat, other in zip(worker.flats, again.flats, strict=True):
        np.testing.assert_array_equal(other.data, flat.data)
    for each in (worker, again):
        each.close()
    if WORLD.rank == 0:
        alone = Worker(serial_config(config), Grid(0), ops_module.make("cpu", "float64"),
                       Recorder())
        alone.initialize(0.5)
        checkpoint.save(alone, folder / "alone")
        for name in ("model.safetensors", "config.json"):
            assert (folder / "here" / name).read_bytes() == (folder / "alone" / name).read_bytes()
