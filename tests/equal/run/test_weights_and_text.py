"""Importing and exporting weights, and generated text: every layout gives one rank's results."""

import gpt2_reference as gpt2
import numpy as np
import pytest
from helpers import assert_close
from safetensors.numpy import load_file
from small_model import EMPTY_STAGES, LAYOUTS, MODEL, WORLD, small_config, worker_of

from mpipar.comm.record import Sums
from mpipar.config.model import model_config
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.inference.generate import Sampling, Text, continue_one, generate

HERE = LAYOUTS[WORLD.size]
SHAPE = {"layers": MODEL.layers, "D": MODEL.d_model, "F": MODEL.ffn, "T": MODEL.seq_len,
         "V": MODEL.vocab_size}  # fmt: skip


def random_tensors(tied=True):
    """Random tensors, the same on every rank; no bias is zero, no scale one."""
    return gpt2.random_weights(np.random.default_rng(11), **SHAPE, tied=tied)


def write(folder, tensors, tied=True, prefix=""):
    """Write the model on world rank 0. Comm: a barrier after it."""
    if WORLD.rank == 0:
        config = gpt2.configuration(**SHAPE, heads=MODEL.heads, tied=tied)
        gpt2.write_model(folder, tensors, config, prefix=prefix)
    WORLD.Barrier()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_imported_model_computes_what_gpt2_computes(layout, tied, folder):
    tensors = random_tensors(tied)
    write(folder, tensors, tied, prefix="transformer." if tied else "")
    worker = worker_of(small_config(layout, tied=tied))
    checkpoint.load(worker, str(folder))
    ids = np.array([28, 3, 0, 17, 17])
    batch = Batch(ids[None], None, np.arange(len(ids)))
    outputs = worker.forward([0], lambda mb: batch)
    assert bool(outputs) == (worker.schedule.num_stages - 1 in worker.stages)
    if outputs:
        parts = worker.comms["tp"].all_gather(outputs[0], "test.logits")  # (tp, N, V/tp)
        logits = np.concatenate(list(parts), axis=1)[:, : MODEL.vocab_size]
        assert_close(logits, gpt2.logits(tensors, MODEL.heads, ids), 1e-12, "logits")
    worker.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "block_bytes",
    [pytest.param(1, marks=pytest.mark.slow), 300, pytest.param(2**24, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_written_file_has_the_same_bytes_on_every_layout(
    layout, block_bytes, tied, folder, monkeypatch
):
    config = small_config(layout, tied=tied)
    worker = worker_of(config)
    worker.initialize()
    monkeypatch.setattr(boxes, "BLOCK_BYTES", block_bytes)
    checkpoint.save(worker, folder / "here")
    worker.close()
    if WORLD.rank == 0:
        monkeypatch.setattr(boxes, "BLOCK_BYTES", 2**24)
        assert_written_as_by_one_rank(config, folder)
        shapes = gpt2.shapes(**SHAPE, tied=tied)
        found = load_file(folder / "here" / "model.safetensors")
        assert {key.removeprefix("transformer."): x.shape for key, x in found.items()} == shapes


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize(("schedule", "split"), EMPTY_STAGES, ids=str)
@pytest.mark.parametrize("layout", [one for one in HERE if one[1] == 2], ids=str)
def test_stages_without_blocks_are_written_and_read(layout, schedule, split, folder):
    assert_written_and_read(small_config(layout, 4, schedule=schedule, stage_layers=split), folder)


def assert_written_as_by_one_rank(config, folder, spread=0.0):
    """The files in `here` have the bytes of those that one rank writes."""
    alone = worker_of(config, alone=True)
    alone.initialize(spread)
    checkpoint.save(alone, folder / "alone")
    for name in ("model.safetensors", "config.json"):
        assert (folder / "here" / name).read_bytes() == (folder / "alone" / name).read_bytes()


def assert_written_and_read(config, folder):
    """A layout reads what it has written, and that has the bytes of one rank."""
    worker, again = worker_of(config), worker_of(config)
    worker.initialize(0.5)
    checkpoint.save(worker, folder / "here")
    WORLD.Barrier()
    checkpoint.load(again, str(folder / "here"))
    for flat, other in zip(worker.flats, again.flats, strict=True):
        np.testing.assert_array_equal(other.data, flat.data)
    for each in (worker, again):
        each.close()
    if WORLD.rank == 0:
        assert_written_as_by_one_rank(config, folder, 0.5)


# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
WIDE = {
    "layers": 4,
    "d_model": 16,
    "heads": 8,
    "head_dim": 6,
    "ffn": 31,
    "seq_len": 16,
    "vocab_size": 29,
}
ARCHS = {
    "llama": {"kv_heads": 2, "bias": "all"},
    "mistral": {"kv_heads": 4},
    "qwen2": {"kv_heads": 1, "tied": True},
    "mixtral": {"kv_heads": 2, "experts": 4},
    "gpt2": {"norm": "rms"},
}  # mpipar's own form, whose files have all axes of the tensors
OF_ARCHS = {2: LAYOUTS[2], 4: [(1, 2, 2), (1, 1, 4)]}.get(WORLD.size, [])  # tp above kv heads
OTHERS = {4: [(2, 1, 2)]}.get(WORLD.size, [])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("layout", "arch"),
    [
        *((layout, arch) for layout in OF_ARCHS for arch in ARCHS),
        *((layout, arch) for layout in OTHERS for arch in ("mixtral", "gpt2")),
    ],
    ids=str,
)
def test_every_form_is_written_and_read(layout, arch, folder, monkeypatch):
    """Llama and its kin, and mpipar's own form: ranks share kv heads and experts."""
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 300)
    model = model_config({"arch": arch} | WIDE | ARCHS[arch])
    assert_written_and_read(
        small_config(layout, model=model, ep=layout[0] if model.experts else 1), folder
    )


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_no_rank_holds_more_than_its_shards(layout, folder, monkeypatch):
    """Rank 0 receives row blocks, never a whole tensor; a block goes only where it is needed."""
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 600)
    worker = worker_of(small_config(layout))
    worker.initialize()
    worker.recorder.reset_counters()
    checkpoint.save(worker, folder)
    largest = max((record.payload_bytes for record in worker.recorder.records), default=0)
    row = 8 * max(3 * MODEL.d_model, MODEL.ffn)
    assert largest <= max(600, row)
    sent = worker.recorder.totals("operation").get(("send",), Sums()).payload_bytes
    received = worker.recorder.totals("operation").get(("recv",), Sums()).payload_bytes
    assert sent == 0 or WORLD.rank > 0
    assert (received > 0) == (WORLD.rank == 0 and layout[1] * layout[2] > 1)
    assert WORLD.allreduce(sent) == WORLD.allreduce(received)
    worker.close()


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_equal_logits_take_the_lowest_id_on_every_layout(layout, folder):
    """All logits are -D, exactly: padding, whose logits are 0, must not win."""
    tensors = random_tensors(tied=False)
    for name, value in (("ln_f.weight", 0), ("ln_f.bias", 1), ("lm_head.weight", -1)):
        tensors[name][...] = value
    write(folder, tensors, tied=False)
    worker = worker_of(small_config(layout, tied=False))
    checkpoint.load(worker, str(folder))
    assert list(continue_one(worker, [4], Sampling(3))) == [0, 0, 0]
    # In draws among equals each id occurs, and none beyond the vocabulary.
    texts = [Text(number, [4]) for number in range(9)]
    for _ in generate(worker, texts, Sampling(9, 1.0)):
        pass
    drawn = [token for text in texts for token in text.tokens[1:]]
    assert max(drawn) < MODEL.vocab_size
    assert len(set(drawn)) > 15
    worker.close()
