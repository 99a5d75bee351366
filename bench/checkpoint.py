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
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.program import Outcome, Program
from bench.training import worker_of
from mpipar.comm.objects import broadcast_text, gather_numbers
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.config.setting import read_bytes
from mpipar.ops import make
from mpipar.run.checkpoint.boxes import BLOCK_BYTES
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.state import Saver, load_state

LAYERS, WIDTH_STEP = 4, 16
BYTES_PER_PARAMETER = 12  # master and two moments in float32
AXES = ("dp", "pp", "tp")  # the first one saves; all of them load


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


# What follows one another: (row, or "" if it is not timed; call; bytes that it moves here).
Turn = list[tuple[str, Callable[[], object], int]]


class Bench:
    """The workers of one launch: the layout that saves, and all others of as many ranks.

    Comm: the groups of each worker. Every rank calls all methods in the same order.
    """

    def __init__(self, world, size: int, folder: Path):
        self.world, self.folder, self.steps = world, folder, count(1)
        axes = AXES if world.size > 1 else AXES[:1]
        model = model_of(size)
        self.workers = {f"{axis}={world.size}": worker(world, axis, model) for axis in axes}
        self.layout, self.first = next(iter(self.workers.items()))
        rng = np.random.default_rng(0)
        for buffer in buffers(self.first):  # the same on all ranks: they are replicas
            buffer[...] = rng.standard_normal(buffer.shape, np.float32)
        self.plain = self.saver("plain", self.first)
        self.beside = self.saver("beside", self.first, background=True)
        self.own = np.concatenate([one.x.reshape(-1) for one in self.plain.own]).view(np.uint8)
        self.file = folder / f"bytes-{world.rank}"

    def saver(self, name: str, of, background: bool = False) -> Saver:
        """Return a Saver into a folder of its own, which keeps one checkpoint."""
        facts = {"config": "", "data": {}}
        return Saver(of, self.folder / name, keep=1, background=background, facts=facts)

    def write(self) -> None:
        """Write the bytes of a save plainly, with fsync."""
        with open(self.file, "xb", buffering=0) as file:
            for at in range(0, len(self.own), BLOCK_BYTES):
                assert file.write(block := self.own[at : at + BLOCK_BYTES].data) == len(block)
            os.fsync(file.fileno())

    def save(self, saver: Saver) -> None:
        saver.save(next(self.steps))

    def load(self, layout: str, saver: Saver) -> None:
        step_folder = newest(saver)
        load_state(self.workers[layout], step_folder, read_manifest(step_folder))

    def forget(self) -> None:
        """Ask the kernel to evict this rank's file of the newest checkpoint from its memory."""
        file = os.open(newest(self.plain) / self.plain.file, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def check(self) -> None:
        """Assert that the state passes through all layouts unchanged."""
        saver = self.plain
        self.save(saver)
        for number, layout in enumerate((*self.workers, self.layout)):
            for buffer in buffers(self.workers[layout]):
                buffer[...] = np.nan
            self.load(layout, saver)
            saver = self.saver(f"again-{number}", self.workers[layout])
            self.save(saver)
        assert read_manifest(newest(saver)).files == read_manifest(newest(self.plain)).files

    def turns(self) -> list[Turn]:
        """Return what takes turns."""
        saved = self.own.nbytes
        found: list[Turn] = [
            [("write + fsync", self.write, saved), ("", self.file.unlink, 0)],
            [("SHA-256", partial(hashlib.sha256, self.own), saved)],
            [("save", partial(self.save, self.plain), saved)],
            [
                ("save, blocked (--save-async)", partial(self.save, self.beside), saved),
                ("save, beside (--save-async)", self.beside.commit, saved),
            ],
        ]
        for layout, one in self.workers.items():
            what = f"load {layout}" + (", as saved" if one is self.first else "")
            held = sum(buffer.nbytes for buffer in buffers(one))
            found.append(
                [("", self.forget, 0), (what, partial(self.load, layout, self.plain), held)]
            )
        return found


def newest(saver: Saver) -> Path:
    """Return the folder of the only checkpoint of a Saver."""
    ((_, step_folder),) = committed_steps(saver.folder)
    return step_folder


def measure(world, turns: list[Turn], repeats: int) -> list[dict]:
    """Return a row for each operation that is timed; none beside world rank 0.

    All take turns, in a new order each time: a disk is slower after a large write, so nothing must
    always come second. Comm: barriers, a gather, and all of the turns.
    """
    found = {what: [float(moved)] for turn in turns for what, _, moved in turn if what}
    for repeat in range(repeats):
        for number in np.random.default_rng(repeat).permutation(len(turns)):
            if world.rank == 0:
                os.sync()  # what others still have to write
            for what, call, _ in turns[number]:
                world.Barrier()
                start = perf_counter()
                call()
                found.setdefault(what, []).append(perf_counter() - start)
    found.pop("", None)
    ranks = gather_numbers(world, np.array(list(found.values())))
    if ranks is None:
        return []
    moved, slowest = ranks[:, :, 0].sum(0), ranks[:, :, 1:].max(0)
    return [row(*one, len(ranks)) for one in zip(found, moved, slowest, strict=True)]


def row(what: str, nbytes: float, seconds: np.ndarray, ranks: int) -> dict:
    """Return the row of an operation."""
    median = float(np.median(seconds))
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
    """Check and measure."""
    world = session.world
    made = session.agree(
        lambda: tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder) if world.rank == 0 else ""
    )
    folder = Path(broadcast_text(world, made or ""))
    try:
        bench = Bench(world, args.size, folder)
        bench.check()
        rows = measure(world, bench.turns(), args.repeats)
    finally:
        world.Barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    facts = {"ranks": world.size, "state": args.size, "repeats": args.repeats}
    return Outcome(rows, facts) if rows else 0


main = Program(
    "checkpoint",
    __doc__,
    measure_job,
    together=True,
    add=add_flags,
    counts={"--repeats": (7, "how often all take turns")},
).started(__name__)
