"""Checkpoints and weights over real ranks.

Resuming is exact, on other layouts too, and ranks fail together. Importing and exporting weights,
and generated text: every layout gives one rank's results.
"""

import hashlib
import os
import shutil
from functools import partial

import gpt2_reference as gpt2
import numpy as np
import pytest
from helpers import assert_close
from safetensors.numpy import load_file
from small_model import EMPTY_STAGES, LAYOUTS, MODEL, WORLD, rows_of, small_config, worker_of

from mpipar.comm.record import Sums
from mpipar.config.model import model_config
from mpipar.config.train import OPTIMIZERS
from mpipar.errors import OutputError
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.state import Saver, load_state
from mpipar.run.files.digests import digest_of
from mpipar.run.generation import Sampling, Text, continue_one, generate
from mpipar.run.resolve import digests_on_host
from mpipar.train.worker import StepVotes

FACTS = {"config": "", "data": {}}
SAVED = [(layout, "1f1b") for layout in LAYOUTS[WORLD.size]]
SAVED += [((1, 2, 1), "dualpipe-v")] if WORLD.size == 2 else [((2, 2, 1), "zb-v")]


def config_of(layout, dtype="float64", optimizer="adamw"):
    """A config for ((dp, pp, tp), schedule)."""
    axes, schedule = layout
    return small_config(axes, 4, schedule=schedule, dtype=dtype, optimizer=optimizer, lr=0.01)


class Trainer:
    """A worker on all ranks. Comm: its groups; every rank makes it."""

    def __init__(self, config):
        self.worker = worker_of(config)
        self.rows = rows_of(self.worker)

    def train(self, first, last, votes=StepVotes):
        """Losses and norms of some steps, and what all have agreed on in the last one."""
        found = [
            self.worker.train_step(step, lambda mb, step=step: self.rows.train(step, mb), votes)
            for step in range(first, last + 1)
        ]
        self.votes = found[-1].votes
        return [(one.loss, one.grad_norm) for one in found]

    def saver(self, folder, background=False):
        return Saver(self.worker, folder, keep=2, background=background, facts=FACTS)

    def load(self, folder):
        """The state of the newest checkpoint of a folder."""
        WORLD.Barrier()
        _, path = committed_steps(folder)[-1]
        load_state(self.worker, path, read_manifest(path))

    def bytes(self):
        """All numbers of this rank's state and of the layers' weights."""
        return [
            buffer.tobytes()
            for flat in self.worker.flats
            for buffer in (flat.data, *flat.state.values())
        ]


def started(config, steps):
    """A Trainer after some steps."""
    made = Trainer(config)
    made.worker.initialize()
    made.train(1, steps)
    return made


def assert_everywhere(right, what):
    """Assert a rank's own finding on all ranks. Comm: one all-gather."""
    assert all(WORLD.allgather(bool(right))), what


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("layout", "dtype", "optimizer"),
    [
        *(
            pytest.param(layout, "float64", "adamw", marks=[pytest.mark.slow] * (WORLD.size > 2))
            for layout in SAVED[1:]
        ),
        *((SAVED[0], "float64", name) for name in OPTIMIZERS),
        (SAVED[0], "bfloat16", "adamw"),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_by_bit(layout, dtype, optimizer, folder):
    config = config_of(layout, dtype, optimizer)
    first = started(config, 2)
    first.saver(folder).save(2)
    went_on = first.train(3, 4)
    again = Trainer(config)
    again.load(folder)
    assert_everywhere(again.train(3, 4) == went_on, "losses")
    assert_everywhere(again.bytes() == first.bytes(), "state")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "adamw")) for name in OPTIMIZERS],
)
def test_other_layouts_have_the_same_losses(optimizer, folder):
    """Each resumes from the checkpoint of the first, saves that state, and the first reads it."""
    config = partial(config_of, optimizer=optimizer)
    first = started(config(SAVED[0]), 2)
    first.saver(folder / "first").save(2)
    before, went_on = first.bytes(), first.train(3, 5)
    for number, layout in enumerate(SAVED[1:]):
        other, back = Trainer(config(layout)), Trainer(config(SAVED[0]))
        other.load(folder / "first")
        other.saver(folder / f"{number}").save(2)
        back.load(folder / f"{number}")
        assert_everywhere(back.bytes() == before, f"state after {layout}")
        back.saver(folder / f"back-{number}").save(2)
        digests = [
            read_manifest(committed_steps(folder / name)[-1][1]).files
            for name in ("first", f"back-{number}")
        ]
        assert_everywhere(digests[0] == digests[1], f"files after {layout}")
        for (loss, norm), (expected, expected_norm) in zip(other.train(3, 5), went_on, strict=True):
            close = abs(loss / expected - 1) < 1e-12 and abs(norm / expected_norm - 1) < 1e-10
            assert_everywhere(close, f"{layout}: {loss} and {expected}")


@pytest.mark.ranks(2, 4)
def test_all_ranks_commit_a_background_save_at_the_same_step(folder):
    trainer = started(config_of(SAVED[0]), 1)
    saver = trainer.saver(folder, background=True)
    saver.save(1)
    state, step = trainer.bytes(), 1
    while not committed_steps(folder):
        step += 1
        assert step < 200
        trainer.train(step, step, lambda: StepVotes(written=saver.written()))
        if trainer.votes.written:
            saver.commit()
        WORLD.Barrier()
    assert_everywhere(saver.saved == 1, "committed")
    again = Trainer(config_of(SAVED[0]))
    again.load(folder)
    assert_everywhere(again.bytes() == state, "the state of its step")


def save(saver, step):
    saver.save(step)
    saver.commit()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("broken", "background"),
    [("a rank's file", False), ("a rank's file", True), ("the folder", False)],
)
def test_ranks_fail_together_and_go_on(broken, background, folder, monkeypatch):
    trainer = Trainer(config_of(SAVED[0]))
    trainer.worker.initialize()
    saver = trainer.saver(folder, background)
    save(saver, 1)
    before = trainer.bytes()
    trainer.train(2, 2)
    last = WORLD.size - 1
    with monkeypatch.context() as patch:

        def fails(*arguments, **named):
            raise OSError(28, "No space left on device")

        if broken == "the folder" and WORLD.rank == 0:
            patch.setattr(os, "mkdir", fails)
        if broken == "a rank's file" and WORLD.rank == last:
            patch.setattr(os, "write", fails)
        named = f"rank {last}: " if broken == "a rank's file" else ""
        with pytest.raises(OutputError, match=rf"step-00000002: .*: {named}No space left"):
            save(saver, 2)
        WORLD.Barrier()  # until the others have failed as well
    assert_everywhere([path.name for path in folder.iterdir()] == ["step-00000001"], "clean")
    save(saver, 2)
    assert_everywhere([step for step, _ in committed_steps(folder)] == [1, 2], "the next save")
    shutil.rmtree(folder / "step-00000002", ignore_errors=True)
    again = Trainer(config_of(SAVED[0]))
    again.load(folder)
    assert_everywhere(again.bytes() == before, "the former checkpoint")


# --- file digests on the ranks of a host: all get those of their own files


class Host:
    """The session of ranks that are all on one host."""

    host_rank = WORLD.rank

    @staticmethod
    def agree(function):
        found = function()
        WORLD.Barrier()
        return found


@pytest.mark.ranks(2, 3)
def test_every_rank_has_the_digest_of_its_own_file(tmp_path):
    path, content = tmp_path / "own", b"of rank 1" if WORLD.rank == 1 else b"of all"
    path.write_bytes(content)
    with open(path, "rb") as file:
        found = digests_on_host(Host, lambda: {"own": digest_of(file, "own")})
    assert found == {"own": hashlib.sha256(content).hexdigest()}


# --- weights and text


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
