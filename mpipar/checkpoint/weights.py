"""Weights on disk: one file of full tensors in the model's form, whatever the layout.

Weights are written and read in row blocks, so that no rank ever holds a tensor it does not own. A
row is an index of a parameter's first logical axis. In the file a row is a contiguous run of bytes.
The reason is that the logical shape only splits axes of the file's shape: (D, 3, H, d) is stored as
(D, 3*D).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mpipar import models
from mpipar import ops as ops_module
from mpipar.checkpoint import boxes, formats
from mpipar.checkpoint.disk import BLOCK_BYTES, safetensors_head
from mpipar.checkpoint.tensor_file import NUMBERS, TensorFile
from mpipar.comm.group import Comms
from mpipar.config.model import model_config
from mpipar.errors import DataError, OutputError
from mpipar.files.bounded import problems_as
from mpipar.files.replace import replace_file
from mpipar.files.text import brief
from mpipar.layers.context import Context

WEIGHTS = "model.safetensors"


def all_params(config, stage_layers) -> list[tuple[int, object]]:
    """(stage, Param) of every whole tensor, from the real layers on shapes, without memory."""
    ops = ops_module.make("shapes", "float32")
    solo = Context(ops, Comms.solo(ops))
    tables, found, form = {}, [], formats.format_of(config)
    for number in range(len(stage_layers)):
        stage = models.model_of(config).Stage(solo, config, number, stage_layers, tables)
        found += [(number, param) for param in stage.flat.params]
    return sorted(found, key=lambda item: form.short_name(item[1].name))


def _blocks(shape, itemsize):
    """[first, last) row blocks of a logical shape, each of at most BLOCK_BYTES (or one row)."""
    whole = tuple((0, length) for length in shape)
    return [rows for rows, *_ in boxes.row_blocks(whole, itemsize, BLOCK_BYTES)]


def _shard_part(param, index, count, first, last):
    """Where shard `index` of `count` meets rows [first, last): (local rows, index into the block).

    None if the shard holds none of these rows.
    """
    if param.cut_axis is None or count == 1:
        return slice(first, last), ()
    axis = param.cut_axis
    width = -(-param.shape[axis] // count)
    start = min(index * width, param.shape[axis])
    stop = min(start + width, param.shape[axis])
    if axis > 0:
        return slice(first, last), (*[slice(None)] * axis, slice(start, stop))
    low, high = max(first, start), min(last, stop)
    if low >= high:
        return None
    return slice(low - start, high - start), (slice(low - first, high - first),)


def stream(worker, array_of):
    """Yield (name, disk shape, first row, block) of full tensors on world rank 0, none elsewhere.

    array_of(param) picks the array to stream: `param.master`, or `param.grad` for a comparison. The
    block keeps the parameter's logical shape. Every rank must run this to the end.
    Comm: per block and owner other than rank 0, one send over world, in the order of the file.
    """
    ops, grid, world = worker.ops, worker.grid, worker.comms.world
    mine = {param.name: param for stage in worker.stages.values() for param in stage.flat.params}
    disk_shape = formats.format_of(worker.config.model).disk_shape
    for stage, param in all_params(worker.config.model, worker.stage_layers):
        pp_rank = worker.schedule.rank_of(stage, 0)
        shards = grid.tp_size if param.cut_axis is not None else 1
        for first, last in _blocks(param.shape, ops.statistics.itemsize):
            block = np.empty((last - first, *param.shape[1:]), ops.statistics)
            for index in range(shards):
                part = _shard_part(param, index, shards, first, last)
                if part is None:
                    continue
                local, place = part
                owner = grid.at(pp=pp_rank, dp=0, cp=0, tp=index)
                piece = None
                if grid.world_rank == owner:
                    own = mine[param.name]
                    inside = [slice(None)] * len(param.shape)
                    if own.cut_axis:  # the padding of the cut axis stays out of the file
                        inside[own.cut_axis] = slice(0, own.bounds()[1] - own.bounds()[0])
                    piece = array_of(own)[(local, *inside[1:])]
                if owner != 0:
                    shape = block[place].shape
                    piece = _move(worker, world, piece, shape, owner, f"save.{param.name}")
                if grid.world_rank == 0:
                    block[place] = ops.to_host(piece)
            if grid.world_rank == 0:
                yield param.name, disk_shape(param), first, block


def _move(worker, world, piece, shape, owner, name):
    """Send one piece from its owner to world rank 0. Comm: one send over world."""
    if worker.grid.world_rank == owner:
        buffer = worker.ops.empty(shape, worker.ops.statistics, label="buffers")
        worker.ops.copy(buffer, piece)
        world.send(buffer, 0, 0, name)
    elif worker.grid.world_rank == 0:
        buffer = worker.ops.empty(shape, worker.ops.statistics, label="buffers")
        return world.recv(buffer, owner, 0, name)
    return None


def save(worker, folder: Path) -> None:
    """Write a worker's weights into a folder, as `write` does. Comm: see `stream`."""
    blocks = (block for _, _, _, block in stream(worker, lambda param: param.master))
    if worker.grid.world_rank == 0:
        write(folder, worker.config, worker.ops.statistics, blocks)
    else:
        for _ in blocks:
            pass


def write(folder: Path, config, dtype, blocks) -> None:
    """Write folder/model.safetensors and config.json; a crash leaves the old files unchanged.

    config: resolved. dtype: of the numbers. blocks: arrays of whole rows of all tensors, those of
    `names_in_file` in their order.
    Raises OutputError if the disk cannot take them.
    """
    form = formats.format_of(config.model)
    head = safetensors_head(
        (form.file_name(param.name), dtype, form.disk_shape(param))
        for _, param in all_params(config.model, (config.model.layers,)))
    text = json.dumps(form.to_json(config, dtype.name), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "config.json", [text.encode()])
        replace_file(folder / WEIGHTS, itertools.chain(
            [head], map(np.ascontiguousarray, blocks)))
    except OSError as error:
        raise OutputError(f"{folder}: the weights could not be written: {error.strerror}") from None


def names_in_file(model) -> list[str]:
    """Names of the parameters of a ModelConfig, in the order of its file of weights."""
    return [param.name for _, param in all_params(model, (model.layers,))]


def weight_problems(config) -> list[str]:
    """What is wrong with the tensors that a run starts from; reads only their names and shapes.

    A config.json that cannot be used gives no problem here. Reading the model's shape reports it.
    """
    folder = config.run.init_from
    if folder is None:
        return []
    try:
        model = model_config(asdict(config.model) | formats.model_settings(folder))
    except DataError:
        return []
    try:
        with _told(folder), _open(folder) as file:
            return _find(file, model, folder)[1]
    except DataError as error:
        return error.problems


def load(worker, folder: str) -> None:
    """Read this rank's shards of every tensor, row block by row block.

    Raises DataError that names all tensors that are missing, have another shape, or hold numbers
    that are not finite.
    """
    with _told(folder), _open(folder) as file:
        found, wrong = _find(file, worker.config.model, folder)
        if wrong:
            raise DataError(wrong)
        for stage in worker.stages.values():
            for param in stage.flat.params:
                if not _load_param(worker.ops, param, file, found[param.name]):
                    wrong.append(found[param.name])
            stage.flat.publish()
    if wrong:
        more = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise DataError(f"--init-from {folder}: tensor {wrong[0]}{more}: not all numbers are finite"
                        f" in {worker.ops.statistics.name}; give other weights")


def _open(folder: str) -> TensorFile:
    return TensorFile(Path(folder) / WEIGHTS)


def _told(folder: str):
    return problems_as(DataError, f"--init-from {folder}: {WEIGHTS}")


def _find(file: TensorFile, model, folder: str) -> tuple[dict[str, str], list[str]]:
    """({parameter name: tensor name in the file}, what is missing or does not fit)."""
    found, wrong, form = {}, [], formats.format_of(model)
    for _, param in all_params(model, (model.layers,)):
        options = [form.file_name(param.name), form.short_name(param.name)]
        name = next((option for option in options if option in file.tensors), None)
        if name is None:
            wrong.append(f"--init-from {folder}: tensor {options[1]} is missing")
            continue
        found[param.name], tensor, needed = name, file.tensors[name], form.disk_shape(param)
        where = f"--init-from {folder}: tensor {name} is"
        if tensor.dtype not in NUMBERS:
            wrong.append(f"{where} {brief(tensor.dtype)}, not one of {', '.join(NUMBERS)}")
        elif tensor.shape != tuple(needed):
            wrong.append(f"{where} {[*tensor.shape]} in the file, {[*needed]} in the model")
    return found, wrong


def _load_param(ops, param, file: TensorFile, name: str) -> bool:
    """Fill one shard from a tensor of a file; return whether all its numbers are finite.

    Padding stays zero.
    """
    finite = True
    per_row = file.tensors[name].shape[0] // param.shape[0]  # rows of the file in a logical row
    start, stop = param.bounds()
    for first, last in _blocks(param.shape, 4):
        part = _shard_part(param, param.cut_index, param.cut_count, first, last)
        if part is None:
            continue
        local, place = part
        block = file.rows(name, first * per_row, last * per_row)
        block = block.reshape(last - first, *param.shape[1:])
        # A float64 that float32 cannot hold is not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(block[place], dtype=ops.statistics)
        finite = finite and bool(np.isfinite(values).all())
        inside = [slice(None)] * len(param.shape)
        if param.cut_axis:
            inside[param.cut_axis] = slice(0, stop - start)
        ops.copy(param.master[(local, *inside[1:])], ops.asarray(values))
    return finite
