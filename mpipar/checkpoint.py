"""Weights on disk: one file of full tensors under Hugging Face's GPT-2 names, whatever the layout.

Written and read in row blocks, so that no rank ever holds a tensor it does not own. A row is an index of a
parameter's first logical axis; in the file a row is a contiguous run of bytes, because the logical shape differs
from the file's only by splitting axes: (D, 3, H, d) is stored as (D, 3*D).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from mpipar import ops as ops_module
from mpipar.comm import Comm
from mpipar.errors import DataError, OutputError
from mpipar.models.decoder import Stage
from mpipar.trace import Recorder

BLOCK_BYTES = 16 * 2**20  # a row block: what one message and one write carry at most
DTYPES = {"float32": "F32", "float64": "F64"}
HF_LAYER = {
    "norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj",
    "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj",
}
HF_OTHER = {
    "embedding.tokens": "wte.weight", "embedding.positions": "wpe.weight",
    "final_norm.w": "ln_f.weight", "final_norm.b": "ln_f.bias", "head.table": "lm_head.weight",
}
# What these layers compute; a configuration that says otherwise is another model.
COMPUTED = {
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
}
FLOATS = ("F64", "F32", "F16", "BF16")


def hf_name(name: str) -> str:
    """Hugging Face's GPT-2 name of a parameter, without the prefix `transformer.`."""
    if name in HF_OTHER:
        return HF_OTHER[name]
    block, layer = name.split(".", 1)
    layer, kind = layer.rsplit(".", 1)
    suffix = {"w": "weight", "b": "bias"}[kind]
    return f"h.{block.removeprefix('block')}.{HF_LAYER[layer]}.{suffix}"


def all_params(config, stage_layers) -> list[tuple[int, object]]:
    """(stage, Param) of every tensor of the model, whole and without memory: the real layers on shapes."""
    ops = ops_module.make("shapes", "float32")
    solo = Comm("tp", (0,), 0, None, Recorder())
    tables, found = {}, []
    for number in range(len(stage_layers)):
        stage = Stage(ops, config, number, stage_layers, solo, tables)
        found += [(number, param) for param in stage.flat.params]
    return sorted(found, key=lambda item: hf_name(item[1].name))


def disk_shape(name: str, shape) -> tuple[int, ...]:
    """Shape in the file: matrices 2-d (in, out), biases 1-d."""
    kind = name.rsplit(".", 1)[1]
    if kind == "b":
        return (math.prod(shape),)
    if name.endswith(("qkv.w",)):
        return (shape[0], math.prod(shape[1:]))
    if name.endswith("proj.w"):
        return (math.prod(shape[:-1]), shape[-1])
    return tuple(shape)


def _blocks(shape, itemsize):
    """[first, last) row blocks of a logical shape, each of at most BLOCK_BYTES (or one row)."""
    rows = max(1, BLOCK_BYTES // (math.prod(shape[1:]) * itemsize))
    return [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def _shard_part(param, index, count, first, last):
    """Where shard `index` of `count` meets rows [first, last): (local rows, index into the block).

    None when it holds none of them.
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
    """Yield (name, disk shape, first row, block) of full tensors on world rank 0, nothing elsewhere.

    array_of(param) picks what is streamed: `param.data`, or `param.grad` for a comparison. The block keeps the
    parameter's logical shape. Every rank must run this to the end.
    Comm: per block and owner other than rank 0, one send over world, in the order of the file.
    """
    ops, grid, world = worker.ops, worker.grid, worker.comms.world
    mine = {param.name: param for stage in worker.stages.values() for param in stage.flat.params}
    for stage, param in all_params(worker.config.model, worker.stage_layers):
        pp_rank = worker.schedule.rank_of(stage, 0)
        shards = grid.tp_size if param.cut_axis is not None else 1
        for first, last in _blocks(param.shape, ops.dtype.itemsize):
            block = np.empty((last - first, *param.shape[1:]), ops.dtype)
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
                    if own.cut_axis:  # padding of the cut axis stays out of the file
                        inside[own.cut_axis] = slice(0, own.bounds()[1] - own.bounds()[0])
                    piece = array_of(own)[(local, *inside[1:])]
                if owner != 0:
                    shape = block[place].shape
                    piece = _move(worker, world, piece, shape, owner, f"save.{param.name}")
                if grid.world_rank == 0:
                    block[place] = ops.to_host(piece)
            if grid.world_rank == 0:
                yield param.name, disk_shape(param.name, param.shape), first, block


def _move(worker, world, piece, shape, owner, name):
    """One piece from its owner to world rank 0. Comm: one send over world."""
    if worker.grid.world_rank == owner:
        buffer = worker.ops.empty(shape, label="buffers")
        worker.ops.copy(buffer, piece)
        world.send(buffer, 0, 0, name)
    elif worker.grid.world_rank == 0:
        return world.recv(worker.ops.empty(shape, label="buffers"), owner, 0, name)
    return None


def save(worker, folder: Path) -> None:
    """Write folder/model.safetensors and config.json; a crash leaves the former ones as they were.

    Raises OutputError on rank 0 when the disk refuses. Comm: see `stream`.
    """
    params = all_params(worker.config.model, worker.stage_layers)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for _, param in params:
        nbytes = math.prod(param.shape) * worker.ops.dtype.itemsize
        name = _file_name(param.name)
        header[name] = {"dtype": DTYPES[worker.ops.dtype.name],
                        "shape": disk_shape(param.name, param.shape),
                        "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = (block for _, _, _, block in stream(worker, lambda param: param.data))
    if worker.grid.world_rank > 0:
        for _ in blocks:
            pass
        return
    config = json.dumps(_hf_config(worker.config), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "config.json", [config.encode()])
        _replace(folder / "model.safetensors",
                 itertools.chain([len(text).to_bytes(8, "little"), text], blocks))
    except OSError as error:
        raise OutputError(f"{folder}: the weights could not be written: {error.strerror}") from None


def _replace(path: Path, pieces) -> None:
    """Write a file under another name and rename it: its readers see all of it or the former one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            for piece in pieces:
                file.write(np.ascontiguousarray(piece) if isinstance(piece, np.ndarray) else piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _file_name(name: str) -> str:
    """The name in our files: as Hugging Face's own save of a GPT2LMHeadModel has it."""
    return hf_name(name) if name == "head.table" else f"transformer.{hf_name(name)}"


def _hf_config(config) -> dict:
    model = config.model
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": model.layers,
        "n_embd": model.d_model, "n_head": model.heads, "n_inner": model.ffn,
        "n_positions": model.seq_len, "n_ctx": model.seq_len, "vocab_size": model.vocab_size,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": model.tied, "torch_dtype": config.run.dtype,
    }


def model_settings(folder: str) -> dict:
    """The ModelConfig fields that folder/config.json fixes. Raises DataError when it can't be used."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text())
        settings = {
            "layers": found["n_layer"], "d_model": found["n_embd"], "heads": found["n_head"],
            "ffn": found.get("n_inner") or 4 * found["n_embd"], "vocab_size": found["vocab_size"],
            "seq_len": found["n_positions"], "tied": found.get("tie_word_embeddings", True),
        }
        for name, value in settings.items():
            if type(value) is not (bool if name == "tied" else int) or (value < 1 and value is not False):
                raise TypeError(f"{name} is {value!r}")
    except OSError as error:
        raise DataError(f"--init-from {folder}: {path.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--init-from {folder}: {path.name} is not a GPT-2 configuration: {error!r}") from None
    wrong = [f"--init-from {folder}: {key} is {found[key]!r}; {value!r} is what mpipar computes"
             for key, value in COMPUTED.items() if found.get(key, value) != value]
    if wrong:
        raise DataError(wrong)
    return settings


def load(worker, folder: str) -> None:
    """Read this rank's shards of every tensor, row block by row block.

    Raises DataError with all tensors that are missing or have another shape. Comm: none.
    """
    path = Path(folder) / "model.safetensors"
    try:
        file = safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DataError(f"--init-from {folder}: {path.name}: {error}") from None
    with file:
        names = set(file.keys())
        found, problems = {}, []
        for _, param in all_params(worker.config.model, worker.stage_layers):
            options = [_file_name(param.name), hf_name(param.name)]
            name = next((option for option in options if option in names), None)
            shape, where = disk_shape(param.name, param.shape), f"--init-from {folder}: tensor {name}"
            if name is None:
                problems.append(f"--init-from {folder}: tensor {options[1]} is missing")
            elif file.get_slice(name).get_dtype() not in FLOATS:
                problems.append(f"{where} is {file.get_slice(name).get_dtype()}, not one of"
                                f" {', '.join(FLOATS)}")
            elif tuple(file.get_slice(name).get_shape()) != shape:
                problems.append(f"{where} is {file.get_slice(name).get_shape()} in the file,"
                                f" {list(shape)} in the model")
            found[param.name] = name
        if problems:
            raise DataError(problems)
        for stage in worker.stages.values():
            for param in stage.flat.params:
                _load_param(worker.ops, param, file.get_slice(found[param.name]))


def _load_param(ops, param, tensor):
    """Fill one shard from a tensor of the file; padding stays zero."""
    per_row = disk_shape(param.name, param.shape)[0] // param.shape[0]  # file rows in a logical row
    start, stop = param.bounds()
    for first, last in _blocks(param.shape, 4):
        part = _shard_part(param, param.cut_index, param.cut_count, first, last)
        if part is None:
            continue
        local, place = part
        block = tensor[first * per_row:last * per_row].reshape(last - first, *param.shape[1:])
        values = np.ascontiguousarray(block[place], dtype=ops.dtype)
        inside = [slice(None)] * len(param.shape)
        if param.cut_axis:
            inside[param.cut_axis] = slice(0, stop - start)
        ops.copy(param.data[(local, *inside[1:])], ops.asarray(values))
