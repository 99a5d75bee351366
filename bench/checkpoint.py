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
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.program import Outcome, Program
from mpipar import ops as ops_module
from mpipar.checkpoint.disk import BLOCK_BYTES
from mpipar.checkpoint.load import load_state
from mpipar.checkpoint.manifest import committed_steps, read_manifest
from mpipar.checkpoint.save import Saver
from mpipar.comm.facts import broadcast_text, gather_numbers
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.config.sizes import read_bytes
from mpipar.config.train import TrainConfig
from mpipar.errors import EXIT_CHECK_FAILED, UsageError
from mpipar.files.text import counted
from mpipar.train.worker import Worker

LIMIT = 1.2  # a save over the sum of its parts
LAYERS, WIDTH_STEP = 4, 16
BYTES_PER_PARAMETER = 12  # master and two moments in float32
ORDER = (
    "write + fsync",
    "SHA-256",
    "save",
    "save, blocked (--save-async)",
    "save, beside (--save-async)",
)  # of the rows, followed by the loads
FACTS = {"config": "", "data": {}}


def model_of(state_bytes: int) -> ModelConfig:
    """Return a decoder whose state has about that many bytes; almost all of it in its blocks."""
    width = (state_bytes / BYTES_PER_PARAMETER / (12 * LAYERS)) ** 0.5
    width = max(WIDTH_STEP, round(width / WIDTH_STEP) * WIDTH_STEP)
    return ModelConfig(layers=LAYERS, d_model=width, heads=4, seq_len=32)


class Bench:
    """The workers of one launch: the layout that saves, and all others of as many ranks.

    Comm: the groups of each worker. Every rank calls all methods in the same order.
    """

    def __init__(self, world, size: int, folder: Path):
        self.world, self.folder, model = world, folder, model_of(size)
        axes = ("dp", "tp", "pp") if world.size > 1 else ("dp",)
        self.workers = {f"{axis}={world.size}": self.worker(axis, model) for axis in axes}
        self.layout, self.first = next(iter(self.workers.items()))
        rng = np.random.default_rng(0)
        for buffer in self.buffers(self.first):  # the same on all ranks: they are replicas
            buffer[...] = rng.standard_normal(buffer.shape, np.float32)
        self.savers = {
            kind: Saver(self.first, folder / kind, keep=1, background=kind == "beside", facts=FACTS)
            for kind in ("plain", "beside")
        }
        self.step = 0
        own = self.savers["plain"].own
        self.mine = np.concatenate([one.x.reshape(-1) for one in own]).view(np.uint8)
        self.plain = folder / f"bytes-{world.rank}"

    def worker(self, axis: str, model: ModelConfig) -> Worker:
        axes = dict.fromkeys(("dp", "tp", "pp"), 1) | {axis: self.world.size}
        grid = GridConfig(**axes, num_microbatches=self.world.size)
        config, _ = resolve(
            Config(model=model, grid=grid, train=TrainConfig(batch_size=self.world.size**2)),
            self.world.size,
        )
        return Worker(
            config,
            Grid.of(config.grid, self.world.rank),
            ops_module.make("cpu", "float32"),
            Recorder(),
            self.world,
        )

    @staticmethod
    def buffers(worker):
        """Yield every flat buffer of a worker's state, without its padding at the end."""
        for flat in worker.flats:
            for buffer in flat.state.values():
                yield buffer[: flat.size]

    def blocks(self):
        """Return the bytes that this rank writes in a save, in the blocks of a save."""
        return (
            memoryview(self.mine)[start : start + BLOCK_BYTES]
            for start in range(0, len(self.mine), BLOCK_BYTES)
        )

    def write(self) -> None:
        """Write the same bytes plainly, with fsync."""
        with open(self.plain, "xb", buffering=0) as file:
            for block in self.blocks():
                assert file.write(block) == len(block)
            os.fsync(file.fileno())

    def hash(self) -> None:
        """Compute SHA-256 of the same bytes."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block)

    def save(self, kind: str) -> None:
        self.step += 1
        self.savers[kind].save(self.step)

    def newest(self, kind: str) -> Path:
        """Return the folder of the only checkpoint of a kind."""
        ((_, step_folder),) = committed_steps(self.folder / kind)
        return step_folder

    def load(self, layout: str) -> None:
        step_folder = self.newest("plain")
        load_state(self.workers[layout], step_folder, read_manifest(step_folder))

    def forget(self) -> None:
        """Ask the kernel to evict this rank's file of the newest checkpoint from its memory."""
        file = os.open(self.newest("plain") / self.savers["plain"].file, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    def check(self) -> None:
        """Assert that each layout reads what was saved, and writes it back unchanged."""
        before = [buffer.copy() for buffer in self.buffers(self.first)]
        self.save("plain")
        for layout in (*self.workers, self.layout):
            worker = self.workers[layout]
            for buffer in self.buffers(worker):
                buffer[...] = np.nan
            self.load(layout)
            again = Saver(worker, self.folder / "again", keep=1, background=False, facts=FACTS)
            again.save(self.step)
            self.world.Barrier()  # until all have read
        for old, new in zip(before, self.buffers(self.first), strict=True):
            assert (old == new).all()
        digests = [read_manifest(self.newest(kind)).files for kind in ("plain", "again")]
        assert digests[0] == digests[1]


def timed(world, function, *arguments) -> float:
    """Return the seconds of the slowest rank. Comm: a barrier, and a gather of the times."""
    world.Barrier()
    start = perf_counter()
    function(*arguments)
    seconds = gather_numbers(world, np.array([perf_counter() - start]))
    return float(seconds.max()) if seconds is not None else 0.0


def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Return {what: seconds of each repetition}. All take turns, in a new order each time.

    A disk is slower after a large write, so nothing must always come second.
    """
    world, found = bench.world, {}

    def note(what, function, *arguments):
        found.setdefault(what, []).append(timed(world, function, *arguments))

    def write():
        note("write + fsync", bench.write)
        bench.plain.unlink()

    def save():
        note("save", bench.save, "plain")
        bench.savers["plain"].finish()

    def save_beside():
        note("save, blocked (--save-async)", bench.save, "beside")
        note("save, beside (--save-async)", bench.savers["beside"].finish)

    def load(layout):
        bench.forget()
        note(f"load {layout}", bench.load, layout)

    turns = [
        write,
        lambda: note("SHA-256", bench.hash),
        save,
        save_beside,
        *(lambda layout=layout: load(layout) for layout in bench.workers),
    ]
    for repeat in range(repeats):
        for number in np.random.default_rng(repeat).permutation(len(turns)):
            if world.rank == 0:
                os.sync()  # what others still have to write
            world.Barrier()
            turns[number]()
    return {what: found[what] for what in ORDER} | dict(sorted(found.items()))


def bytes_of(bench: Bench, found) -> dict[str, int] | None:
    """Return {what: bytes of all ranks} on world rank 0: what they write, or hold after a load."""
    numbers = [
        len(bench.mine)
        if not what.startswith("load ")
        else sum(
            buffer.nbytes for buffer in bench.buffers(bench.workers[what.removeprefix("load ")])
        )
        for what in found
    ]
    gathered = gather_numbers(bench.world, np.array(numbers, float))
    return None if gathered is None else dict(zip(found, gathered.sum(0).tolist(), strict=True))


def rows_of(found: dict, sizes: dict, layout: str, ranks: int) -> list[dict]:
    """Return a row for each operation."""
    rows = []
    for what, seconds in found.items():
        median = statistics.median(seconds)
        per_second = sizes[what] / median / 2**30
        rows.append(
            {
                "what": what.replace(f"load {layout}", f"load {layout}, as saved"),
                "ranks": ranks,
                "MiB_per_rank": sizes[what] / ranks / 2**20,
                "median_ms": 1000 * median,
                "best_ms": 1000 * min(seconds),
                "GiB_per_s_and_rank": per_second / ranks,
                "GiB_per_s": per_second,
            }
        )
    return rows


def add_flags(parser) -> None:
    """Add the flags for how much is written, and where."""
    parser.add_argument("--size", default="256M", help="bytes of the state of all ranks (256M)")
    parser.add_argument("--folder", default=".", help="where to write (here); removed at the end")


def check_size(args, parser) -> None:
    """Read --size. Raises UsageError."""
    try:
        args.bytes = read_bytes(args.size)
    except ValueError as error:
        raise UsageError(f"--size {args.size}: {error}") from None


def measure_job(args, session) -> Outcome | int:
    """Check and measure; return code 1 if a save takes more than LIMIT times its parts."""
    world = session.world
    made = session.agree(
        lambda: tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder) if world.rank == 0 else ""
    )
    folder = Path(broadcast_text(world, made or ""))
    try:
        bench = Bench(world, args.bytes, folder)
        bench.check()
        found = measure(bench, args.repeats)
        sizes = bytes_of(bench, found)
    finally:
        world.Barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    return outcome(args, found, sizes, bench.layout, world.size) if world.rank == 0 else 0


def outcome(args, found: dict, sizes: dict, layout: str, ranks: int) -> Outcome:
    """Return the table, and the save compared with its parts."""
    rows, state_bytes = rows_of(found, sizes, layout, ranks), sizes["save"]
    medians = {what: statistics.median(seconds) for what, seconds in found.items()}
    ratio = medians["save"] / (medians["write + fsync"] + medians["SHA-256"])
    kept = ratio <= LIMIT
    summary = f"\na save takes {ratio:.2f} times its two parts; limit {LIMIT}"
    return Outcome(
        rows,
        {
            "ranks": ranks,
            "state_MiB": round(state_bytes / 2**20, 1),
            "repeats": args.repeats,
            "save_over_parts": round(ratio, 3),
        },
        0 if kept else EXIT_CHECK_FAILED,
        head=f"state of {state_bytes / 2**20:.0f} MiB, {counted(ranks, 'rank')}, saved by {layout}",
        end=summary if kept else f"{summary}\nthe limit is exceeded",
    )


main = Program(
    "checkpoint",
    __doc__,
    measure_job,
    together=True,
    add=add_flags,
    check=check_size,
    counts={"--repeats": (7, "how often all take turns")},
).started(__name__)
