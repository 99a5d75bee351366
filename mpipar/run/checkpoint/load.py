"""Loads the state of a checkpoint onto any layout: each rank reads the boxes that it holds."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mpipar.comm.grid import ISLAND
from mpipar.errors import DataError
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint.manifest import Manifest, Tensor, digest_problem, saved_as, saved_kinds
from mpipar.run.checkpoint.weight_files import open_tensors
from mpipar.run.files.bounded import problems_as

MOST_LINES = 20  # of a table of tensors


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
            shared = boxes.overlap(piece.box, box)
            if shared is None:
                continue
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


def state_problems(worker, step_folder: Path, manifest: Manifest) -> list[str]:
    """Return how a checkpoint's tensors and moments differ from a worker's model, as a table."""
    ours = {
        param.name: Tensor(param.shape, worker.ops.accum_dtype.name)
        for _, param in worker.all_params
    }
    theirs = manifest.tensors
    names = [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
    lines = [
        f"{name}: {theirs.get(name)} in the checkpoint, {ours.get(name)} in the model"
        for name in names[:MOST_LINES]
    ]
    kinds = saved_kinds(("master", *worker.optimizer.kinds), worker.config.grid.islands)
    if manifest.kinds != kinds:
        lines.append(
            f"for each tensor it has {', '.join(manifest.kinds)}; the optimizer"
            f" {worker.config.train.optimizer} needs {', '.join(kinds)}"
        )
    head = f"{step_folder}: the checkpoint is of another model:"
    return ["\n  ".join([head, *lines])] if lines else []


def load_state(worker, step_folder: Path, manifest: Manifest) -> None:
    """Fill a worker with a checkpoint's masters, moments and loss scale, on any layout.

    The worker is then as it was after the saved step. Padding stays zero. Raises DataError that
    names file and tensor. It does not communicate: the caller must agree on the outcome, since
    another rank may have failed.
    """
    wrong = state_problems(worker, step_folder, manifest)
    if wrong:
        raise DataError(wrong)
    with Pieces(step_folder, manifest) as pieces:
        fill(
            worker,
            lambda param, kind, box: pieces.read(param.name, saved_as(kind, worker.island), box),
        )
    worker.outer.begun = True
    worker.loss_scale.restore(manifest.scales[worker.grid.group_rank(ISLAND)]._asdict())


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
