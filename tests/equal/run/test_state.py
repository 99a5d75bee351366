"""Checkpoints over real ranks: resuming is exact, on other layouts too, and ranks fail together."""

import hashlib
import os
import shutil

import pytest
from small_model import LAYOUTS, WORLD, rows_of, small_config, worker_of

from mpipar.errors import OutputError
from mpipar.run import compared
from mpipar.run.checkpoint.load import load_state
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.save import Saver
from mpipar.train.gradsync import StepVotes

FACTS = {"config": "", "data": {}}
HERE = [(layout, "1f1b") for layout in LAYOUTS[WORLD.size]]
HERE += [((1, 2, 1), "dualpipe-v")] if WORLD.size == 2 else [((2, 2, 1), "zb-v")]


def config_of(layout, dtype="float64"):
    """A config with AdamW for ((dp, pp, tp), schedule)."""
    axes, schedule = layout
    return small_config(axes, 4, schedule=schedule, dtype=dtype, optimizer="adamw", lr=0.01)


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
    ("layout", "dtype"),
    [
        *(
            pytest.param(layout, "float64", marks=[pytest.mark.slow] * (WORLD.size > 2))
            for layout in HERE[1:]
        ),
        (HERE[0], "float64"),
        (HERE[0], "bfloat16"),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_by_bit(layout, dtype, folder):
    config = config_of(layout, dtype)
    first = started(config, 2)
    first.saver(folder).save(2)
    went_on = first.train(3, 4)
    again = Trainer(config)
    again.load(folder)
    assert_everywhere(again.train(3, 4) == went_on, "losses")
    assert_everywhere(again.bytes() == first.bytes(), "state")


@pytest.mark.ranks(2, 4)
def test_other_layouts_have_the_same_losses(folder):
    """Each resumes from the checkpoint of the first, saves that state, and the first reads it."""
    first = started(config_of(HERE[0]), 2)
    first.saver(folder / "first").save(2)
    before, went_on = first.bytes(), first.train(3, 5)
    for number, layout in enumerate(HERE[1:]):
        other, back = Trainer(config_of(layout)), Trainer(config_of(HERE[0]))
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
    trainer = started(config_of(HERE[0]), 1)
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
    again = Trainer(config_of(HERE[0]))
    again.load(folder)
    assert_everywhere(again.bytes() == state, "the state of its step")


def save(saver, step):
    saver.save(step)
    saver.finish()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("broken", "background"),
    [("a rank's file", False), ("a rank's file", True), ("the folder", False)],
)
def test_ranks_fail_together_and_go_on(broken, background, folder, monkeypatch):
    trainer = Trainer(config_of(HERE[0]))
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
    again = Trainer(config_of(HERE[0]))
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
        found = compared.digests_on_host(Host, {"own": file})
    assert found == {"own": hashlib.sha256(content).hexdigest()}
