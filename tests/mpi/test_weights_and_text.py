"""Weights in and out, and generated text: every layout has one rank's bytes, logits, tokens."""

import json
from dataclasses import replace

import gpt2_reference as gpt2
import numpy as np
import pytest
from helpers import assert_close
from small_model import EMPTY_STAGES, LAYOUTS, MODEL, WORLD, small_config

from mpipar import ops as ops_module
from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder, Sums
from mpipar.config.model import model_config
from mpipar.data.rows import Batch
from mpipar.inference.generate import continue_one
from mpipar.inference.sampling import Sampling
from mpipar.train.verify import serial_config
from mpipar.train.worker import Worker

HERE = LAYOUTS[WORLD.size]
SHAPE = {"layers": MODEL.layers, "D": MODEL.d_model, "F": MODEL.ffn, "T": MODEL.seq_len,
         "V": MODEL.vocab_size}  # fmt: skip
PROMPTS = {"one": [5], "odd": [28, 0, 7], "full": [1, 2, 3, 4, 5, 6, 7]}


def worker_of(config, alone=False):
    """This rank's part of a layout, or the whole model in this process."""
    ops = ops_module.make("cpu", config.run.dtype)
    if alone:
        return Worker(serial_config(config), Grid(0), ops, Recorder())
    return Worker(config, Grid.of(config.grid, WORLD.rank), ops, Recorder(), WORLD)


def random_tensors(tied=True):
    """Random tensors, the same on every rank; no bias is zero, no scale one."""
    return gpt2.random_weights(np.random.default_rng(11), **SHAPE, tied=tied)


def write(folder, tensors, tied=True, prefix=""):
    """Write the model on world rank 0. Comm: a barrier behind it."""
    if WORLD.rank == 0:
        config = gpt2.configuration(**SHAPE, heads=MODEL.heads, tied=tied)
        gpt2.write_model(folder, tensors, config, prefix=prefix)
    WORLD.Barrier()


def config_of(layout, tied=True):
    return small_config(layout, model=replace(MODEL, tied=tied))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_imported_model_computes_what_gpt2_computes(layout, tied, folder):
    tensors = random_tensors(tied)
    write(folder, tensors, tied, prefix="transformer." if tied else "")
    worker = worker_of(config_of(layout, tied))
    checkpoint.load(worker, str(folder))
    ids = np.array([28, 3, 0, 17, 17])
    batch = Batch(ids[None], None, np.arange(len(ids)))
    outputs = worker.forward([0], lambda mb: batch)
    assert bool(outputs) == (worker.schedule.num_stages - 1 in worker.stages)
    if outputs:
        parts = worker.comms["tp"].all_gather(outputs[0], "test.logits")  # (tp, N, V/tp)
        logits = np.concatenate(list(parts), axis=1)[:, :MODEL.vocab_size]
        assert_close(logits, gpt2.logits(tensors, MODEL.heads, ids), 1e-12, "logits")
    worker.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("block_bytes", [
    pytest.param(1, marks=pytest.mark.slow), 300, pytest.param(2**24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_written_file_has_the_same_bytes_on_every_layout(
    layout, block_bytes, tied, folder, monkeypatch
):
    config = config_of(layout, tied)
    worker = worker_of(config)
    worker.initialize()
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
    checkpoint.save(worker, folder / "here")
    worker.close()
    if WORLD.rank == 0:
        alone = worker_of(config, alone=True)
        alone.initialize()
        monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 2**24)
        checkpoint.save(alone, folder / "alone")
        for name in ("model.safetensors", "config.json"):
            assert (folder / "here" / name).read_bytes() == (folder / "alone" / name).read_bytes()
        shapes = gpt2.shapes(**SHAPE, tied=tied)
        found = gpt2.read_file(folder / "here" / "model.safetensors")
        assert {key.removeprefix("transformer."): x.shape for key, x in found.items()} == shapes


def assert_same_bytes(config, folder):
    """Assert that a layout writes the bytes of one rank, and reads its own numbers back."""
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
        alone = worker_of(config, alone=True)
        alone.initialize(0.5)
        checkpoint.save(alone, folder / "alone")
        for name in ("model.safetensors", "config.json"):
            assert (folder / "here" / name).read_bytes() == (folder / "alone" / name).read_bytes()


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize(("schedule", "split"), EMPTY_STAGES, ids=str)
@pytest.mark.parametrize("layout", [one for one in HERE if one[1] == 2], ids=str)
def test_stages_without_blocks_are_written_and_read(layout, schedule, split, folder):
    assert_same_bytes(small_config(layout, 4, schedule=schedule, stage_layers=split), folder)


@pytest.mark.parametrize("block_bytes", [1, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_there_and_back_in_small_blocks_changes_nothing(layout, block_bytes, folder, monkeypatch):
    """All values differ, so a tensor that reaches a wrong rank or row shows."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
    tensors = random_tensors(tied=False)
    write(folder, tensors, tied=False)
    worker = worker_of(config_of(layout, tied=False))
    checkpoint.load(worker, str(folder))
    checkpoint.save(worker, folder / "again")
    worker.close()
    if WORLD.rank == 0:
        again = gpt2.read_file(folder / "again" / "model.safetensors")
        for name, x in tensors.items():
            full = name if name == "lm_head.weight" else f"transformer.{name}"
            np.testing.assert_array_equal(again[full], x, err_msg=name)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_mpipars_own_form_has_the_same_bytes_on_every_layout(layout, folder, monkeypatch):
    """With RMSNorm the file has all axes of the tensors, and any layout reads them back."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 300)
    config = small_config(layout, model=replace(MODEL, norm="rms"))
    assert_same_bytes(config, folder)


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_no_rank_holds_more_than_its_shards(layout, folder, monkeypatch):
    """Rank 0 receives row blocks, never a whole tensor; a block goes only where it is needed."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 600)
    worker = worker_of(config_of(layout))
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


def text_of(worker, prompt, temperature, seed=3, count=9):
    return list(continue_one(worker, prompt, Sampling(count, temperature, seed)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_text_fills_the_model_and_is_gpt2_s(temperature, folder):
    """test_generation.py compares other layouts with one rank."""
    tensors = random_tensors()
    write(folder, tensors)
    worker = worker_of(config_of(HERE[0]))
    checkpoint.load(worker, str(folder))
    for name, prompt in PROMPTS.items():
        found = text_of(worker, prompt, temperature)
        assert len(prompt) + len(found) == MODEL.seq_len + 1, "the model is full"
        if temperature == 0:
            expected = gpt2.greedy(tensors, MODEL.heads, prompt, len(found), MODEL.seq_len)
            assert found == expected, name
    worker.close()


@pytest.mark.ranks(1, 2)
def test_sampling_follows_seed_and_temperature(folder):
    write(folder, random_tensors())
    worker = worker_of(config_of(HERE[0]))
    checkpoint.load(worker, str(folder))
    cold = text_of(worker, [1, 2], 0.0)
    assert text_of(worker, [1, 2], 1e-9) == cold
    warm = {tuple(text_of(worker, [1, 2], 5.0, seed)) for seed in range(4)}
    assert len(warm) == 4
    assert tuple(cold) not in warm
    worker.close()


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_equal_logits_take_the_lowest_id_on_every_layout(layout, folder):
    """All logits are -D, exactly: padding, whose logits are 0, must not win."""
    tensors = random_tensors(tied=False)
    for name, value in (("ln_f.weight", 0), ("ln_f.bias", 1), ("lm_head.weight", -1)):
        tensors[name][...] = value
    write(folder, tensors, tied=False)
    worker = worker_of(config_of(layout, tied=False))
    checkpoint.load(worker, str(folder))
    assert text_of(worker, [4], 0.0, count=3) == [0, 0, 0]
    # In draws among equals each id occurs, and none beyond the vocabulary.
    drawn = [token for seed in range(9) for token in text_of(worker, [4], 1.0, seed)]
    assert max(drawn) < MODEL.vocab_size
    assert len(set(drawn)) > 15
    worker.close()


def test_config_of_the_written_model(folder):
    worker = worker_of(config_of(HERE[0]))
    worker.initialize()
    checkpoint.save(worker, folder)
    worker.close()
    if WORLD.rank == 0:
        found = json.loads((folder / "config.json").read_text())
        wanted = gpt2.configuration(**SHAPE, heads=MODEL.heads, tied=True)
        assert {key: found.get(key) for key in ("n_layer", "n_inner", "vocab_size")} == {
            key: wanted[key] for key in ("n_layer", "n_inner", "vocab_size")}


# --- files of Llama and its kin, kv heads and experts shared by ranks among them

# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
HF_SHAPE = {"layers": 4, "d_model": 16, "heads": 8, "head_dim": 6, "ffn": 31, "seq_len": 16,
            "vocab_size": 29}
ARCHS = {"llama": {"kv_heads": 2, "bias": "all"}, "mistral": {"kv_heads": 4},
         "qwen2": {"kv_heads": 1, "tied": True}, "mixtral": {"kv_heads": 2, "experts": 4}}
HF_HERE = {2: HERE, 4: [(1, 2, 2), (1, 1, 4)]}.get(WORLD.size, [])  # the last: tp above kv heads
EXPERTS_HERE = {4: [(2, 1, 2)]}.get(WORLD.size, [])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("layout", "arch"), [
    *((layout, arch) for layout in HF_HERE for arch in ARCHS),
    *((layout, "mixtral") for layout in EXPERTS_HERE)], ids=str)
def test_every_layout_writes_and_reads_the_same_bytes(layout, arch, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 300)
    model = model_config({"arch": arch} | HF_SHAPE | ARCHS[arch])
    config = small_config(layout, model=model, ep=layout[0] if model.experts else 1)
    assert_same_bytes(config, folder)
