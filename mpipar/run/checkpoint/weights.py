"""Weights on disk: full tensors in the model's format, whatever the layout.

Weights are written and read in blocks of rows, so that no rank ever holds a tensor it does not own.
A row is an index of a parameter's first logical axis. In the file a row is a contiguous run of
bytes, because the logical shape only splits axes of the file's shape, as (D, 3, H, d) is stored as
(D, 3*D); or a row is several tensors of the file, such as the matrices of an expert.

Beside them are the tokenizer's files. A run copies those from its data or from the weights that it
starts from, so that other programs can load what it writes together with its tokenizer.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from mpipar.config.model import model_config
from mpipar.config.text import brief
from mpipar.errors import DataError, OutputError
from mpipar.models.on_shapes import all_params
from mpipar.run.checkpoint import boxes, formats
from mpipar.run.checkpoint.manifest import read_manifest
from mpipar.run.checkpoint.state import Pieces, fill
from mpipar.run.checkpoint.weight_files import NUMBERS, WeightFiles, write_weights
from mpipar.run.data import tokenizer
from mpipar.run.files import no_links
from mpipar.run.files.bounded import problems_as, read_bytes, read_json
from mpipar.run.files.no_links import replace_file

MOST_TOLD = 20  # problems of tensors that are reported
MOST_MISSING = 5  # with more, all names may be other ones
HEAD = "lm_head.weight"
GENERATION = "generation_config.json"  # with the token ids that begin and end a text
BESIDE = (*tokenizer.FILES, GENERATION)  # files that travel with weights from run to run
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Masks and angles that old files carry; mpipar computes them.
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|(^|\.)rotary_emb\.inv_freq$")


def shard_of(worker, flat, param, kind: str):
    """Return a parameter's shard (local shape) on its first data rank; kind: master or grad.

    Comm: if the data group shards it, one reduce over that group; other ranks then get None.
    """
    shared = flat.level > 0 if kind == "grad" else flat.is_sharded(kind)
    if not shared:
        return getattr(param, kind)
    ops = worker.ops
    shard = ops.zeros((param.size,), ops.accum_dtype, label="buffers")
    pieces = flat.reduced_grads if kind == "grad" else flat.pieces(kind)
    for first, values in flat.parts(param, pieces):  # pieces are disjoint, so the sum is exact
        ops.copy(shard[first : first + values.size], values)
    return flat.group.reduce(shard.reshape(param.local_shape), 0, f"save.{param.name}")


def stream(worker, kind: str):
    """Yield (name, block) of full tensors on world rank 0, none elsewhere.

    kind: `master` for weights, `grad` for gradients. The block has whole rows of the parameter's
    logical shape. Every rank must run this to the end.
    Comm: that of `shard_of`; per block and owner other than rank 0, one send over world, in the
    order of `all_params`.
    """
    ops, grid = worker.ops, worker.grid
    first = replace(grid, world_rank=0)
    mine = {param.name: (flat, param) for flat in worker.flats for param in flat.params}
    for stage, param in worker.all_params:
        pp_rank, own = worker.schedule.stage_to_rank[stage], None
        if param.name in mine and mine[param.name][1].owner:
            own = shard_of(worker, *mine[param.name], kind)
        for box in boxes.row_blocks(boxes.whole_box(param.shape), ops.accum_dtype.itemsize):
            block = np.empty(boxes.shape_of(box), ops.accum_dtype)
            for places in param.shards(grid):
                shard = param.box_at(grid, places)
                if (part := boxes.overlap(shard, box)) is None:
                    continue
                owner = first.rank_at(pp=pp_rank, **places)
                piece = own[boxes.within(part, shard)] if grid.world_rank == owner else None
                if owner != 0:
                    piece = _move(worker, piece, boxes.shape_of(part), owner, param.name)
                if grid.world_rank == 0:
                    block[boxes.within(part, box)] = ops.to_host(piece)
            if grid.world_rank == 0:
                yield param.name, block


def _move(worker, piece, shape, owner, name):
    """Send one piece from its owner to world rank 0. Comm: one send over world."""
    if worker.grid.world_rank not in (0, owner):
        return None
    world, barrier = worker.comms.world, f"save.{name}"
    buffer = worker.ops.empty(shape, worker.ops.accum_dtype, label="buffers")
    if worker.grid.world_rank == 0:
        return world.recv(buffer, owner, 0, barrier)
    worker.ops.copy(buffer, piece)
    return world.send(buffer, 0, 0, barrier)


def save(worker, folder: Path) -> None:
    """Write a worker's weights into a folder, as `write` does. Comm: see `stream`."""
    blocks = (block for _, block in stream(worker, "master"))
    if worker.grid.world_rank == 0:
        write(folder, worker.config.model, worker.ops.accum_dtype, blocks)
    else:
        list(blocks)  # sends this rank's, and is empty


def export(step_folder: Path, folder: Path, model) -> None:
    """Write the weights of a checkpoint as `write` does, without MPI or a worker.

    Raises DataError if they are not those of the model.
    """
    dtype = np.dtype(next(iter(read_manifest(step_folder).tensors.values())).dtype)

    def blocks(read):
        for _, param in all_params(model, (model.layers,)):
            for rows in boxes.row_blocks(boxes.whole_box(param.shape), dtype.itemsize):
                array = np.empty(boxes.shape_of(rows), dtype)
                for box, block in read(param, rows):
                    array[boxes.within(box, rows)] = block
                yield array

    with _source(str(step_folder), model) as (read, _):
        write(folder, model, dtype, blocks(read))


def write(folder: Path, model, dtype, blocks) -> None:
    """Write the files of weights and config.json; a crash leaves the old files unchanged.

    model: a completed ModelConfig. dtype: of the numbers in the files, to which they are rounded.
    blocks: arrays of whole rows of all parameters, in order.
    Raises OutputError if they cannot be written.
    """
    form = formats.format_of(model)
    made = [
        (name, dtype, shape)
        for _, param in all_params(model, (model.layers,))
        for name, shape in form.tensors(param).items()
    ]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        texts = config_texts(folder, form.to_json(model, dtype.name))
        rounded = (np.ascontiguousarray(block, dtype) for block in blocks)
        write_weights(folder, texts, made, rounded)
    except OSError as error:
        raise OutputError(f"{folder}: the weights could not be written: {error.strerror}") from None


def unread_notes(config) -> list[str]:
    """Return a note that names the tensors in the files of the first weights that are not read.

    Only names and shapes are read. Raises DataError that names all tensors that are missing or
    differ from the model of config.json; what is wrong with that is reported when it is read.
    """
    folder = config.run.init_from
    if folder is None:
        return []
    try:
        model = model_config(asdict(config.model) | formats.model_settings(folder))
    except DataError:
        return []
    with _source(folder, model) as (_, rest):
        what = f"{folder}: tensors that the model of config.json does not have, not read"
        return [f"{what}: {formats.some_names(rest)}"] if rest else []


def load(worker, folder: str) -> None:
    """Read this rank's shards of every tensor, one block of rows at a time.

    folder: of weight files, or a checkpoint, of which the master weights are read. Raises DataError
    for tensors that do not fit, and for one that contains numbers that are not finite.
    """
    with _source(folder, worker.config.model) as (read, _):
        fill(
            worker,
            lambda param, _, box: _finite(
                folder, param.name, read(param, box), worker.ops.accum_dtype
            ),
            ["master"],
        )


@contextmanager
def _source(folder: str, model):
    """Yield (a function, names of tensors that the model does not have) of weights.

    The function (Param, box) -> (box, array) reads parts that cover a box. Raises DataError.
    """
    if formats.is_step(folder):
        manifest = read_manifest(Path(folder))
        saved = {name: tensor.shape for name, tensor in manifest.tensors.items()}
        shapes = {param.name: param.shape for _, param in all_params(model, (model.layers,))}
        if wrong := [name for name in shapes if saved.get(name) != shapes[name]]:
            raise DataError(
                f"{folder}: not the tensors of its configuration: {formats.some_names(wrong)}"
            )
        with Pieces(folder, manifest) as pieces:
            yield lambda param, box: pieces.read(param.name, "master", box), []
    else:
        with WeightFiles(folder) as files:
            found, wrong = _find(files, model)
            if wrong:
                raise DataError(wrong[:MOST_TOLD])
            # A head that a tied model does not have is its embedding; another one is refused.
            read = {name for one in found.values() for name in one} | {HEAD}
            rest = [name for name in files.tensors if name not in read and not BUFFERS.search(name)]
            yield lambda param, box: _read(files, found[param.name], param, box), rest


def _finite(folder: str, name: str, blocks, dtype):
    """Yield the parts of a tensor as another type; raise DataError if not all are finite."""
    for box, block in blocks:
        with np.errstate(over="ignore", invalid="ignore"):  # a float64 may overflow float32
            values = np.ascontiguousarray(block, dtype)
        if not np.isfinite(values).all():
            raise DataError(
                f"{folder}: not all numbers of {name} are finite in {values.dtype.name}; give other"
                " weights"
            )
        yield box, values


def _find(files: WeightFiles, model) -> tuple[dict[str, dict], list[str]]:
    """Return ({parameter: its tensors, by their names in the files}, what is missing or misfits).

    A model without its head is saved without the prefix of the names.
    """
    found, missing, wrong, form = {}, [], [], formats.format_of(model)
    for _, param in all_params(model, (model.layers,)):
        found[param.name] = {}
        for full, needed in form.tensors(param).items():
            name = full if full in files.tensors else full.removeprefix(form.prefix)
            tensor, where = files.tensors.get(name), f"{files.where}: tensor {name} is"
            found[param.name][name] = needed
            if tensor is None:
                missing.append(name)
            elif tensor.dtype not in NUMBERS:
                wrong.append(f"{where} {brief(tensor.dtype)}, not one of {', '.join(NUMBERS)}")
            elif tensor.shape != needed:
                wrong.append(f"{where} {[*tensor.shape]} in the file, {[*needed]} in the model")
    if missing:
        wrong += _missing(files, missing, {name for one in found.values() for name in one})
    elif not wrong and model.tied:
        wrong += _head_problems(files, next(iter(found["embedding.tokens"])))
    return found, wrong


def _missing(files: WeightFiles, missing: list[str], read: set[str]) -> list[str]:
    """Return what to say about missing tensors: one line if many have other names in the files."""
    others = [name for name in files.tensors if name not in read]
    if len(missing) <= MOST_MISSING or not others:
        return [f"{files.where}: tensor {name} is missing" for name in missing]
    cure = "save the model itself, not what wraps it, with a LoRA adapter merged into it"
    text = f"tensor {missing[0]} and {len(missing) - 1:,} more are missing; the file has names such"
    return [f"{files.where}: {text} as {brief(others[0])} instead: {cure}"]


def _head_problems(files: WeightFiles, table: str) -> list[str]:
    """Return a problem if the files of a tied model have a head that is not its embedding."""
    if HEAD not in files.tensors:
        return []
    blocks = boxes.row_blocks(boxes.whole_box(files.tensors[table].shape), 8)
    if files.tensors[HEAD] == files.tensors[table] and all(
        np.array_equal(files.slices[HEAD][first:last], files.slices[table][first:last])
        for (first, last), *_ in blocks
    ):
        return []
    cure = 'write "tie_word_embeddings": false there to use this head, or remove it from the file'
    return [f"{files.where}: tensor {HEAD} is not {table}, but config.json ties them: {cure}"]


def _read(files: WeightFiles, tensors: dict, param, held):
    """Yield (box, array) of the parts of a parameter's tensors in the shard `held`."""
    row = math.prod(param.shape[1:])
    for rows in boxes.row_blocks((held[0], *boxes.whole_box(param.shape)[1:]), 4):
        parts = [
            files.slices[name][first:last].reshape(-1)
            for name, first, last in formats.file_rows(tensors, *(row * one for one in rows[0]))
        ]
        block = np.concatenate(parts).reshape(boxes.shape_of(rows))
        wanted = (rows[0], *held[1:])
        yield wanted, block[boxes.within(wanted, rows)]


def read_tokenizer_files(source: Path | None, speaks=None) -> dict[str, bytes]:
    """Return {name: content} of the files to put beside weights.

    source: the folder of the initial weights. speaks: the run's Tokenizer; if it is another one,
    nothing in `source` applies. Otherwise its generation_config.json says which ids begin and end
    a text, else config.json, else the tokenizer. Raises DataError for a file that cannot be read.
    """
    found, files = tokenizer.read_files(source) if source else {}, speaks.files if speaks else {}
    if source:
        with problems_as(DataError, str(source / GENERATION)):
            if (source / GENERATION).exists():
                found[GENERATION] = read_bytes(source / GENERATION)
            elif any(one is not None for one in token_ids(source / "config.json").values()):
                found[GENERATION] = json_bytes(token_ids(source / "config.json"))
    if (
        files
        and found.keys() - {GENERATION}
        and any(found.get(name) != files.get(name) for name in tokenizer.FILES)
    ):
        found = {}
    if GENERATION not in found and speaks and speaks.end is not None:
        found[GENERATION] = json_bytes({"eos_token_id": speaks.end})
    return found | files


def write_tokenizer_files(found: dict[str, bytes], folder: Path) -> None:
    """Write files into a folder, which is created if necessary; refuse a link. Raises OSError."""
    no_links.make_root(folder.parent)
    for name, content in found.items():
        replace_file(f"{folder.name}/{name}", [content], root=folder.parent)


def token_ids(path: Path, vocab_size: int | None = None) -> dict:
    """Return {key: id, list of ids, or None} for IDS from a JSON file; all None without the file.

    An id outside the vocabulary is treated as None.
    """
    with problems_as(DataError, str(path)):
        content = read_json(path) if path.exists() else {}
    found = content if isinstance(content, dict) else {}
    return {key: found[key] if _is_id(found.get(key), vocab_size) else None for key in IDS}


def _is_id(value, vocab_size: int | None) -> bool:
    ids = value if isinstance(value, list) and value else [value]
    return all(type(one) is int and 0 <= one < (vocab_size or one + 1) for one in ids)


def config_texts(folder: Path, config: dict) -> dict[str, str]:
    """Return {name: text} of config.json and generation_config.json to write into a folder.

    config: all fields except the token ids, which are taken from the folder's existing
    generation_config.json; that file is not changed.
    """
    path = folder / GENERATION
    ids = token_ids(path, config.get("vocab_size"))
    texts = {"config.json": json_bytes(config | ids).decode()}
    return texts if path.exists() else texts | {GENERATION: json_bytes(ids).decode()}


def json_bytes(value) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()
