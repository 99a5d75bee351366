"""Checkpoints of the full state: how fast ranks write and read them, and what a save costs a run.

    mpiexec -n 2 python -m bench.checkpoint

A save is compared with its two parts, a plain write with fsync and a SHA-256, each measured alone
on the same bytes in the same run; all take turns in random order. A time is that of the slowest
rank, starting from a barrier. A load begins with files that the kernel has been asked to evict from
memory. Its bytes are those that the ranks hold afterwards: the full state on each data-parallel
rank. Old checkpoints are deleted outside the timed part. Before anything is timed, the state must
come back bit by bit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from bench.program import Outcome, Program
from bench.training import worker_of
from mpipar.comm.facts import broadcast_text, gather_numbers
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.config.sizes import read_bytes
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.ops import make
from mpipar.run.checkpoint.disk import BLOCK_BYTES
from mpipar.run.checkpoint.load import load_state
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.save import Saver
from mpipar.run.files.text import counted

LIMIT = 1.2  # a save over the sum of its parts
LAYERS, WIDTH_STEP = 4, 16
BYTES_PER_PARAMETER = 12  # master and two moments in float32
AXES = ("dp", "pp", "tp")  # the first one saves; all of them load
FACTS = {"config": "", "data": {}}


def model_of(state_bytes: int) -> dict:
    """Return a decoder whose state has about that many bytes; almost all of it in its blocks."""
    width = (state_bytes / BYTES_PER_PARAMETER / (12 * LAYERS)) ** 0.5
    width = max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)
    return {"layers": LAYERS, "d_model": width, "heads": 4, "seq_len": 32}


def worker(world, axis: str, model: dict):
    """Return the worker of a layout with one axis. Comm: its groups."""
    grid = dict.fromkeys(AXES, 1) | {axis: world.size, "num_microbatches": world.size}
    config, _ = resolve(build(model | grid | {"batch_size": world.size**2}), world.size)
    return worker_of(config, world, make("cpu", "float32"))


def buffers(of) -> list[np.ndarray]:
    """Return the flat buffers of a worker's state, without their padding at the end."""
    return [buffer[: flat.size] for flat in of.flats for buffer in flat.state.values()]


class Part(NamedTuple):
    """A part of a turn. what: its row, or "" if it is not timed. nbytes: that it moves here."""

    what: str
    call: Callable[[], None]
    nbytes: int = 0


class Bench:
    """The workers of one launch: the layout that saves, and all others of as many ranks.

    Comm: the groups of each worker. Every rank calls all methods in the same order.
    """

    def __init__(self, world, size: int, folder: Path):
        self.world, self.folder, self.step = world, folder, 0
        axes = AXES if world.size > 1 else AXES[:1]
        self.workers = {
            f"{axis}={world.size}": worker(world, axis, model_of(size)) for axis in axes
        }
        self.layout, self.first = next(iter(self.workers.items()))
        rng = np.random.default_rng(0)
        for buffer in buffers(self.first):  # the same on all ranks: they are replicas
            buffer[...] = rng.standard_normal(buffer.shape, np.float32)
        self.plain, self.beside = (
            Saver(self.first, folder / kind, keep=1, background=kind == "beside", facts=FACTS)
            for kind in ("plain", "beside")
        )
        own = np.concatenate([one.x.reshape(-1) for one in self.plain.own]).view(np.uint8)
        self.blocks = [own[at : at + BLOCK_BYTES].data for at in range(0, len(own), BLOCK_BYTES)]
        self.file = folder / f"bytes-{world.rank}"

    def write(self) -> None:
        """Write the bytes of a save plainly, with fsync."""
        with open(self.file, "xb", buffering=0) as file:
            for block in self.blocks:
                assert file.write(block) == len(block)
            os.fsync(file.fileno())

    def hash(self) -> None:
        """Compute SHA-256 of the same bytes."""
        digest = hashlib.sha256()
        for block in self.blocks:
            digest.update(block)

    def save(self, saver: Saver) -> None:
        self.step += 1
        saver.save(self.step)

    def load(self, layout: str) -> None:
        step_folder = newest(self.plain)
        load_state(self.workers[layout], step_folder, read_manifest(step_folder))

    def forget(self) -> None:
        """Ask the kernel to evict this rank's file of the newest checkpoint from its memory."""
        file = os.open(newest(self.plain) / self.plain.file, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def check(self) -> None:
        """Assert that each layout reads what was saved, and writes it back unchanged."""
        before = [buffer.copy() for buffer in buffers(self.first)]
        self.save(self.plain)
        for layout in (*self.workers, self.layout):
            for buffer in buffers(self.workers[layout]):
                buffer[...] = np.nan
            self.load(layout)
            kept = {"keep": 1, "background": False, "facts": FACTS}
            again = Saver(self.workers[layout], self.folder / "again", **kept)
            again.save(self.step)
            self.world.Barrier()  # until all have read
        for old, new in zip(before, buffers(self.first), strict=True):
            assert (old == new).all()
        digests = [read_manifest(newest(saver)).files for saver in (self.plain, again)]
        assert digests[0] == digests[1]

    def turns(self) -> list[list[Part]]:
        """Return what takes turns: the parts of each, one after the other."""
        saved = sum(map(len, self.blocks))
        found = [
            [Part("write + fsync", self.write, saved), Part("", self.file.unlink)],
            [Part("SHA-256", self.hash, saved)],
            [Part("save", partial(self.save, self.plain), saved), Part("", self.plain.finish)],
            [
                Part("save, blocked (--save-async)", partial(self.save, self.beside), saved),
                Part("save, beside (--save-async)", self.beside.finish, saved),
            ],
        ]
        for layout, one in self.workers.items():
            what = f"load {layout}" + (", as saved" if one is self.first else "")
            held = sum(buffer.nbytes for buffer in buffers(one))
            found.append([Part("", self.forget), Part(what, partial(self.load, layout), held)])
        return found


def newest(saver: Saver) -> Path:
    """Return the folder of the only checkpoint of a Saver."""
    ((_, step_folder),) = committed_steps(saver.folder)
    return step_folder


def measure(world, turns: list[list[Part]], repeats: int) -> dict[str, np.ndarray] | None:
    """Return {what: bytes of all ranks, seconds of each repetition}; None beside world rank 0.

    All take turns, in a new order each time: a disk is slower after a large write, so nothing must
    always come second. Comm: barriers, a gather, and all of the turns.
    """
    found = {part.what: [float(part.nbytes)] for turn in turns for part in turn if part.what}
    for repeat in range(repeats):
        for number in np.random.default_rng(repeat).permutation(len(turns)):
            if world.rank == 0:
                os.sync()  # what others still have to write
            for part in turns[number]:
                world.Barrier()
                start = perf_counter()
                part.call()
                if part.what:
                    found[part.what].append(perf_counter() - start)
    ranks = gather_numbers(world, np.array(list(found.values())))
    if ranks is None:
        return None
    ranks[0, :, 0] = ranks[:, :, 0].sum(0)
    ranks[0, :, 1:] = ranks[:, :, 1:].max(0)
    return dict(zip(found, ranks[0], strict=True))


def row(what: str, ranks: int, nbytes: float, seconds: np.ndarray) -> dict:
    """Return the row of an operation."""
    median = statistics.median(seconds)
    return {
        "what": what,
        "ranks": ranks,
        "MiB_per_rank": nbytes / ranks / 2**20,
        "median_ms": 1000 * median,
        "best_ms": 1000 * min(seconds),
        "GiB_per_s_and_rank": nbytes / ranks / median / 2**30,
        "GiB_per_s": nbytes / median / 2**30,
    }


def add_flags(parser) -> None:
    """Add the flags for how much is written, and where."""
    size = "bytes of the state of all ranks (256M)"
    parser.add_argument("--size", type=read_bytes, default="256M", help=size)
    parser.add_argument("--folder", default=".", help="where to write (here); removed at the end")


def measure_job(args, session) -> Outcome | int:
    """Check and measure; return code 1 if a save takes more than LIMIT times its parts."""
    world = session.world
    made = session.agree(
        lambda: tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder) if world.rank == 0 else ""
    )
    folder = Path(broadcast_text(world, made or ""))
    try:
        bench = Bench(world, args.size, folder)
        bench.check()
        found = measure(world, bench.turns(), args.repeats)
    finally:
        world.Barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    return 0 if found is None else outcome(found, bench.layout, world.size, args.repeats)


def outcome(found: dict[str, np.ndarray], layout: str, ranks: int, repeats: int) -> Outcome:
    """Return the table, and the save compared with its parts."""
    rows = [row(what, ranks, nbytes, seconds) for what, (nbytes, *seconds) in found.items()]
    medians = {one["what"]: one["median_ms"] for one in rows}
    ratio = medians["save"] / (medians["write + fsync"] + medians["SHA-256"])
    kept, state = ratio <= LIMIT, found["save"][0] / 2**20
    facts = {"ranks": ranks, "state_MiB": round(state, 1), "repeats": repeats}
    return Outcome(
        rows,
        facts | {"save_over_parts": round(ratio, 3)},
        EXIT_OK if kept else EXIT_CHECK_FAILED,
        head=f"state of {state:.0f} MiB, {counted(ranks, 'rank')}, saved by {layout}",
        end=f"\na save takes {ratio:.2f} times its two parts; limit {LIMIT}"
        + ("" if kept else "\nthe limit is exceeded"),
    )


main = Program(
    "checkpoint",
    __doc__,
    measure_job,
    together=True,
    add=add_flags,
    counts={"--repeats": (7, "how often all take turns")},
).started(__name__)
