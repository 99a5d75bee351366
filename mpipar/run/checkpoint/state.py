"""The whole state of a run: every rank writes and reads its boxes, and one rename commits them.

The protocol, in which a process may be killed after any step:

1. Rank 0 creates the folder `step-N.partial-TOKEN`.
2. Each rank writes one new file with its pieces. No tensor is communicated.
3. Rank 0 gathers size and digest of each file, checks that all of them are there, and writes the
   manifest.
4. Rank 0 renames the folder to `step-N`, which is the commit.
5. Rank 0 removes checkpoints that need not be kept, and what killed runs have left.

Every file and folder is synced to disk before the next step, so a folder `step-N` is complete. They
are accessed without following links, see `mpipar.run.files.no_links`, and nothing but the files of
checkpoints is ever deleted.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from mpipar.comm.grid import ISLAND
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.errors import DataError, OutputError
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint.formats import some_names
from mpipar.run.checkpoint.manifest import (
    COMMON,
    NAME,
    PIECES_FILE,
    STEP_FOLDER,
    File,
    Manifest,
    Piece,
    Tensor,
    committed_steps,
    digest_problem,
    file_problems,
    pieces_file,
    saved_as,
    saved_kinds,
    step_folder_name,
)
from mpipar.run.checkpoint.weight_files import open_tensors, safetensors_head
from mpipar.run.files import no_links
from mpipar.run.files.bounded import problems_as

# The second is what a version before 0.3 was deleting when it was killed.
PARTIAL = re.compile(rf"{STEP_FOLDER.pattern}\.partial-[0-9a-f]+|\.trash-step-.*")


def write_new(path: Path, chunks) -> tuple[int, str]:
    """Write a file that must not exist yet; return (bytes, SHA-256) of its intended content.

    path: of a file in a checkpoint folder in a run's `checkpoints`; none of the three may be a
    link. chunks: bytes and arrays. Each is hashed in memory before it is written, so that a disk
    that writes something else is detected. The file is on disk when this returns. Raises OSError.

    The kernel starts writing a block once it is told that its pages are no longer needed, so the
    disk writes one block while the next one is hashed.
    """
    digest, size = hashlib.sha256(), 0
    run_folder = path.parents[2]
    with no_links.create(run_folder, str(path.relative_to(run_folder))) as file:
        for chunk in chunks:
            data = memoryview(
                np.ascontiguousarray(chunk)  # a transposed view has other bytes
                if isinstance(chunk, np.ndarray)
                else chunk
            ).cast("B")
            digest.update(data)
            start, size = size, size + len(data)
            while data:
                data = data[os.write(file.fileno(), data) :]
            if size - start >= boxes.BLOCK_BYTES // 2:
                os.posix_fadvise(file.fileno(), start, size - start, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk; its files have their own fsync."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def put_in_place(partial: Path, step: int) -> None:
    """Give a complete partial folder its final name, which is the commit. Raises OSError.

    A checkpoint of the same step that is there is damaged, and goes.
    """
    folder = no_links.folder(partial.parents[1], partial.parent.name)
    final = folder / step_folder_name(step)
    if os.path.lexists(final):
        final.rename(_partial(final))
    partial.rename(final)
    sync_folder(folder)


def remove_outdated(folder: Path, step: int, keep: int) -> None:
    """Remove what is not needed after the commit of `step`; a failure is left for the next time.

    Of the checkpoints before it, the newest keep - 1 stay (keep 0: all). Folders left by killed
    runs go, too. A checkpoint loses its name before its files, so that none is ever half of one.
    """
    with suppress(OSError, DataError):
        inside = no_links.folder(folder.parent, folder.name)
        earlier = [path for number, path in committed_steps(folder) if number < step]
        for path in earlier[: max(0, len(earlier) - keep + 1)] if keep else []:
            path.rename(_partial(path))
        for path in inside.iterdir():
            if PARTIAL.fullmatch(path.name):
                delete(path)


def delete(path: Path) -> None:
    """Delete the files of a checkpoint, and its folder unless something else is in it."""
    with suppress(OSError):
        for file in no_links.folder(path.parents[1], f"{path.parent.name}/{path.name}").iterdir():
            if file.name == NAME or PIECES_FILE.fullmatch(file.name):
                file.unlink()
        path.rmdir()


def _partial(path: Path) -> Path:
    """Return a name of its own for a step's folder that is no checkpoint yet, or no longer."""
    return path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")


class Own(NamedTuple):
    """A piece that this rank writes: its description, and the view that holds its numbers."""

    piece: Piece
    x: object


def place_among_copies(comms, param, shared=False, everywhere=True) -> tuple[int, int]:
    """Return (index, count) of this rank among all ranks that hold the same numbers of a Param.

    These are the ranks of its own copy groups, and of the data group unless that shards the numbers
    (`shared`); and of all islands, unless each has its own.
    """
    index, count = 0, 1
    groups = (
        *param.copy_groups,
        *(() if shared else param.grad_groups[-1:]),
        *((ISLAND,) if everywhere else ()),
    )
    for comm in (comms[name] for name in groups):
        index, count = index * comm.size + comm.group_rank, count * comm.size
    return index, count


def own_pieces(worker) -> list[Own]:
    """Return the pieces that this rank writes, in the order of its file.

    The rows of a box are distributed over its copies, so all ranks write, and no row is written
    twice.
    """
    file, found = pieces_file(worker.grid.world_rank), []
    for flat in worker.flats:
        for buffer in flat.state:
            kind = saved_as(buffer, worker.island)
            everywhere = worker.island is None or buffer in COMMON
            for param, held, x in boxes.boxes_in(flat, buffer):
                place = place_among_copies(worker.comms, param, flat.is_sharded(buffer), everywhere)
                box = boxes.share_of_rows(held, *place)
                if boxes.volume(box):
                    key = f"{param.name}/{kind}/{len(found)}"  # a tensor may have several
                    own = Own(Piece(file, key, param.name, kind, box), x[boxes.within(box, held)])
                    assert own.x.shape == boxes.shape_of(box), "a piece is not what its box says"
                    found.append(own)
    return found


def row_blocks(own: Own, ops):
    """Yield (place in the piece, host array) of a piece, one block of whole rows at a time."""
    box = own.piece.box
    for block in boxes.row_blocks(box, ops.accum_dtype.itemsize):
        place = boxes.within(block, box)
        yield place, ops.to_host(own.x[place])


def write_pieces(path: Path, own: list[Own], ops, watch=lambda blocks, total: blocks) -> dict:
    """Write one rank's file; return {bytes, sha256}, or the error of a disk.

    watch(blocks, their bytes): yields the blocks, and may show how far they are.
    """
    head = safetensors_head(
        (one.piece.key, ops.accum_dtype, boxes.shape_of(one.piece.box)) for one in own
    )
    blocks = (block for one in own for _, block in row_blocks(one, ops))
    total = sum(one.x.size for one in own) * ops.accum_dtype.itemsize
    try:
        size, digest = write_new(path, itertools.chain([head], watch(blocks, total)))
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"bytes": size, "sha256": digest}


def copies_of(own: list[Own], empty: Callable[..., object], dtype: np.dtype) -> list[Own]:
    """Return the pieces with new arrays of the same shapes, made by empty(shape, dtype)."""
    return [Own(piece, empty(boxes.shape_of(piece.box), dtype)) for piece, _ in own]


class Flight(NamedTuple):
    """A save that has begun. partial: where all ranks write. outcome: that of `write_pieces`."""

    step: int
    partial: Path
    loss_scale: dict
    outcome: Future


class Saver:
    """Writes checkpoints of a worker's state into `folder`, which belongs to this run alone.

    Every rank creates its Saver, and calls `save` and `commit` at the same step. Both raise
    OutputError on every rank if any rank could not write; the partial folder is then removed, and
    earlier checkpoints are unchanged.

    keep: how many of the newest checkpoints to keep (0: all). background: whether a thread writes a
    copy of the state while training continues; it never calls MPI. facts: `config`, the
    configuration as TOML, and `data`, the fingerprint of the data. ready(): called on rank 0 before
    each save; raises OSError or OutputError if the run folder cannot take one. watch: shows how far
    this rank's own writing is, see `write_pieces`; not in background.

    saved: the step of the last commit, or None. blocked_seconds: how long the last `save` blocked
    training.
    Comm: one gather over the world.
    """

    def __init__(
        self,
        worker,
        folder: Path,
        *,
        keep: int,
        background: bool,
        facts: dict,
        ready: Callable[[], None] = lambda: None,
        watch: Callable[[Iterable, int], Iterable] = lambda blocks, total: blocks,
    ):
        self.worker, self.folder, self.keep, self.facts = worker, Path(folder), keep, facts
        self.ready, self.watch = ready, watch
        self.comm, self.mpi_world = worker.comms.world, worker.comms.mpi_world
        self.own = own_pieces(worker)
        self.file = pieces_file(worker.grid.world_rank)
        gathered = gather_objects(self.mpi_world, [one.piece for one in self.own])
        self.pieces = tuple(
            Piece(*names, tuple((first, stop) for first, stop in box))
            for pieces in gathered or []
            for *names, box in pieces
        )
        self.tensors = {
            param.name: Tensor(param.shape, worker.ops.accum_dtype.name)
            for _, param in worker.all_params
        }
        if gathered:  # a piece that is not written is a defect: it must not reach a disk
            found: Counter = Counter()
            for tensor, kind, box in {one[2:] for one in self.pieces}:
                found[tensor, kind] += boxes.volume(box)
            needed = {
                (param.name, kind): math.prod(param.shape)
                for _, param in worker.all_params
                for kind in saved_kinds(
                    worker.optimizer.kinds_of(param), worker.config.grid.islands
                )
            }
            assert dict(found) == needed, "the pieces do not cover the state"
        self.copy = None
        if background:
            self.thread = ThreadPoolExecutor(1, "checkpoint")
            self.copy = copies_of(self.own, worker.ops.pinned, worker.ops.accum_dtype)
        self.flight: Flight | None = None
        self.saved: int | None = None
        self.blocked_seconds = 0.0

    def save(self, step: int) -> None:
        """Save the state after `step`; in background mode only the copy is made here.

        A step that is already committed is not saved again. A save still in flight is committed
        first, and if that fails, this save does not begin.
        Comm: that of `commit`, and a barrier and a broadcast over the world.
        """
        start = perf_counter_ns()
        self.commit()
        if self.saved != step:
            name = self._on_rank_0("save.folder", step, lambda: self._begin(step))
            partial, outcome = self.folder / name, Future()
            path, ops = partial / self.file, self.worker.ops
            if self.copy is not None:
                for one, copied in zip(self.own, self.copy, strict=True):
                    for place, block in row_blocks(one, ops):
                        copied.x[place] = block
                outcome = self.thread.submit(write_pieces, path, self.copy, ops)
            self.flight = Flight(step, partial, self.worker.loss_scale.state(), outcome)
            if self.copy is None:
                outcome.set_result(write_pieces(path, self.own, ops, self.watch))
                self.commit()
        self.worker.recorder.span("save", start)
        self.blocked_seconds = (perf_counter_ns() - start) * 1e-9

    def written(self) -> bool:
        """Return whether a background save is in flight and this rank has written its file."""
        return self.flight is not None and self.flight.outcome.done()

    def commit(self) -> None:
        """Commit the save in flight, if there is one; wait for this rank's writing.

        Comm: two barriers, a gather of sizes and digests, and a broadcast over the world.
        """
        flight = self.flight
        if flight is None:
            return
        start, written = perf_counter_ns(), flight.outcome.result()
        self.comm.barrier("save.written")
        facts = gather_objects(self.mpi_world, [written, flight.loss_scale])
        self.flight = None
        self._on_rank_0("save.committed", flight.step, lambda: self._commit_files(flight, facts))
        self.worker.recorder.span("save", start)
        self.saved = flight.step

    def _on_rank_0(self, barrier: str, step: int, function: Callable[[], str | None]) -> str:
        """Return on every rank the text, if any, that rank 0 gets; all raise if it fails there.

        Comm: a barrier and a broadcast over the world.
        """
        answer = ""
        if self.comm.group_rank == 0:
            try:
                answer = function() or ""
            except (OSError, OutputError) as error:
                why = getattr(error, "strerror", None) or error
                answer = f"/{why}"  # no folder name begins with a slash
        self.comm.barrier(barrier)
        answer = broadcast_text(self.mpi_world, answer)
        if answer.startswith("/"):
            raise OutputError(
                f"{self.folder / step_folder_name(step)}: the checkpoint could not be written:"
                f" {answer[1:]}; earlier checkpoints are unchanged"
            )
        return answer

    def _begin(self, step: int) -> str:
        """Return the name of the folder made for a step, which no reader looks at. Rank 0 only.

        The run folder, in which `folder` is, exists. Raises OSError and OutputError.
        """
        self.ready()
        inside = no_links.folder(self.folder.parent, self.folder.name, make=True)
        sync_folder(self.folder.parent)
        partial = _partial(inside / step_folder_name(step))
        partial.mkdir()
        sync_folder(inside)
        return partial.name

    def _commit_files(self, flight: Flight, facts: list) -> None:
        """Write the manifest and rename the folder. Rank 0 only; raises OSError and OutputError.

        facts: for each rank, what `write_pieces` returned and its loss scale.
        """
        partial = flight.partial
        failed = [
            f"rank {rank}: {fact['error']}"
            for rank, (fact, _) in enumerate(facts)
            if "error" in fact
        ]
        try:
            if not failed:
                files = {pieces_file(rank): File(**fact) for rank, (fact, _) in enumerate(facts)}
                failed = file_problems(partial, files)  # as when hosts do not share the folder
            if failed:
                raise OutputError("; ".join(failed))
            first, *further = (scale for _, scale in facts[:: self.worker.comms["inner"].size])
            manifest = Manifest(
                step=flight.step,
                config=self.facts["config"],
                layout=self.worker.grid.layout,
                schedule=self.worker.schedule.name,
                loss_scale=first,
                data=self.facts["data"],
                tensors=self.tensors,
                files=files,
                pieces=self.pieces,
                further_scales=tuple(further),
            )
            write_new(partial / NAME, [manifest.text().encode()])
            sync_folder(partial)
            put_in_place(partial, flight.step)
        except (OSError, OutputError):
            delete(partial)
            raise
        remove_outdated(self.folder, flight.step, self.keep)


class Pieces(ExitStack):
    """The pieces of a checkpoint, to be read box by box.

    A file is opened when it is first needed, after all of its bytes have been compared with its
    digest. Every method raises DataError that names the file and the tensor.
    """

    def __init__(self, step_folder: Path, manifest: Manifest):
        super().__init__()
        self.folder, self.manifest = Path(step_folder), manifest
        self.files, self.by_tensor = {}, {}
        for piece in manifest.pieces:
            self.by_tensor.setdefault((piece.tensor, piece.kind), []).append(piece)

    def read(self, tensor: str, kind: str, box: boxes.Box):
        """Yield (box, array) of parts that cover a box exactly once, each of about BLOCK_BYTES."""
        dtype = np.dtype(self.manifest.tensors[tensor].dtype)
        for piece in self.by_tensor[tensor, kind]:
            if (shared := boxes.overlap(piece.box, box)) is not None:
                stored = self._open(piece).get_slice(piece.key)
                for block in boxes.row_blocks(shared, dtype.itemsize):
                    rows, *others = boxes.within(block, piece.box)
                    yield block, stored[rows][:, *others]

    def _open(self, piece):
        if piece.file not in self.files:
            path = self.folder / piece.file
            problem = digest_problem(path, self.manifest.files[piece.file].sha256)
            if problem:
                raise DataError(f"{problem}; tensor {piece.tensor} ({piece.kind}) is in it")
            with problems_as(DataError, str(path)):
                self.files[piece.file] = self.enter_context(open_tensors(path))
        return self.files[piece.file]


def load_state(worker, step_folder: Path, manifest: Manifest) -> None:
    """Fill a worker with a checkpoint's masters, moments and loss scale, on any layout.

    The worker is then as it was after the saved step. Padding stays zero. Raises DataError that
    names file and tensor, or what another model or optimizer has. It does not communicate: the
    caller must agree on the outcome, since another rank may have failed.
    """
    dtype, islands = worker.ops.accum_dtype.name, worker.config.grid.islands
    ours = {param.name: Tensor(param.shape, dtype) for _, param in worker.all_params}
    ours |= dict.fromkeys(saved_kinds(("master", *worker.optimizer.kinds), islands))
    theirs = manifest.tensors | dict.fromkeys(manifest.kinds)
    if wrong := sorted(name for name in ours | theirs if ours.get(name, 0) != theirs.get(name, 0)):
        raise DataError(
            f"{step_folder}: the checkpoint is of another model or optimizer, which differs in"
            f" {some_names(wrong)}"
        )
    with Pieces(step_folder, manifest) as pieces:
        fill(
            worker,
            lambda param, kind, box: pieces.read(param.name, saved_as(kind, worker.island), box),
        )
    worker.outer.begun = True
    worker.loss_scale.restore(manifest.scales[worker.grid.group_rank(ISLAND)])


def fill(worker, read, kinds=()) -> None:
    """Fill a worker's buffers; padding stays as it is.

    read(Param, kind, box): yields (box, array) of parts that cover a box. kinds: of state; all of
    it by default.
    """
    ops = worker.ops
    for flat in worker.flats:
        for kind in kinds or flat.state:
            for target in flat.weights if kind == "master" else [kind]:
                for param, held, x in boxes.boxes_in(flat, target):
                    for box, block in read(param, kind, held):
                        ops.copy(x[boxes.within(box, held)], ops.asarray(block))
        flat.copy_master_to_params()
