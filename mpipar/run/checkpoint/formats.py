"""Formats of models on disk, and what a config.json or a checkpoint says about a model.

A format is a module. PREFIX begins the names of tensors, and may be missing in a file. COMPUTED is
{field of config.json: values that mpipar computes, the first one if the field is missing}. READ are
all fields that are read, and ALIASES {other name of a field: field}. Its function `tensors` gives
{name: shape} of the tensors in the files that hold a parameter's numbers, one after another;
usually there is one. The other functions are `describes`, `to_json`, `settings`, and `differences`,
which lists what else is not computed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from mpipar.config.model import CUTS
from mpipar.config.sections import FIELDS, build
from mpipar.config.setting import field_problem
from mpipar.config.text import brief, shown
from mpipar.errors import DataError
from mpipar.run.checkpoint import native_format
from mpipar.run.checkpoint.hf_form import GPT2
from mpipar.run.checkpoint.hf_llama import LLAMA, MISTRAL, QWEN2
from mpipar.run.checkpoint.hf_mixtral import MIXTRAL
from mpipar.run.checkpoint.manifest import NAME, STEP_FOLDER, read_manifest
from mpipar.run.files.bounded import read_json
from mpipar.run.files.settings import values_of

FORMS = {form.kind: form for form in (GPT2, LLAMA, MISTRAL, QWEN2, MIXTRAL)}  # by model_type
# Fields about how a model is stored, made or run elsewhere, but not about what it computes.
OUTSIDE = {
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "_name_or_path",
    "initializer_range",
    "use_cache",
    "pretraining_tp",  # sums in parts
    "reorder_and_upcast_attn",  # more digits
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "task_specific_params",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
}
# Fields by which any model may say that it computes something else, and when they do not say it.
NEUTRAL = {
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "qk_norm": (False, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "use_mrope": (False, None),
    "alibi": (False, None),
    "embedding_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
}
# Every published GPT-2 says 0.1, so it is no reason to refuse one.
DROPOUT = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
MOST_NAMED = 12  # ignored fields in a line


def format_of(model):
    """Return a ModelConfig's format: Hugging Face's if that can describe it, else mpipar's."""
    return next((form for form in FORMS.values() if form.describes(model)), native_format)


def file_slices(
    tensors: dict[str, tuple[int, ...]], first: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first, stop): which slice of which tensor in the files holds [first, stop).

    first, stop: numbers of a parameter. tensors: the parameter's, see above.
    """
    start = 0
    for name, shape in tensors.items():
        end = start + math.prod(shape)
        if first < end and start < stop:
            yield name, max(first - start, 0), min(stop, end) - start
        start = end


def apart(tensors: dict[str, tuple[int, ...]], x) -> dict:
    """Return {name: array} of the tensors in the files, from all numbers x of a parameter."""
    ends = list(itertools.accumulate(map(math.prod, tensors.values())))
    parts = np.split(x.reshape(-1), ends[:-1])
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(tensors.items(), parts, strict=True)
    }


def is_step(folder) -> bool:
    """Return whether a folder is a checkpoint; any other one holds files of weights.

    A checkpoint stays one when its manifest is removed, so that the message names the manifest.
    """
    path = Path(folder)
    return os.path.exists(path / NAME) or (
        STEP_FOLDER.fullmatch(path.name) is not None and not os.path.exists(path / "config.json")
    )


def model_settings(folder: str, seq_len: int | None = None, where: str = "") -> dict:
    """Return the ModelConfig fields that a folder of weights or a checkpoint fixes.

    seq_len: the tokens per row that the user wants, if the weights leave that open. where: what the
    user typed (--init-from and the folder). Raises DataError, with everything that is wrong, if the
    model cannot be used.
    """
    where = where or f"--init-from {folder}"
    if is_step(folder):
        return _saved_settings(folder, where)
    found, form, kind = _read(folder, where)
    found, contradictions = _by_one_name(form, found)
    try:
        settings = form.settings(found)
        different = [
            *contradictions,
            *_other_values(form, found),
            *form.differences(found, seq_len),
        ]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{where}: config.json is not a {kind} configuration: {brief(what)}"
        ) from None
    wrong = [f"{where}: config.json: {text}" for text in (*different, *_out_of_bounds(settings))]
    if wrong:
        raise DataError(wrong)
    return settings


def _read(folder: str, where: str):
    """Return (content, format, its name) of folder/config.json. where: begins each message."""
    where += ": config.json"
    found = read_json(Path(folder) / "config.json", where=where)
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise DataError(f"{where}: is not an object with a 'model_type'")
    if kind == native_format.KIND:
        return found, native_format, shown(kind)
    if kind not in FORMS:
        raise DataError(f"{where}: model_type is {shown(kind)}; mpipar computes {', '.join(FORMS)}")
    return found, FORMS[kind], kind


def _by_one_name(form, found: dict) -> tuple[dict, list[str]]:
    """Return a config.json with one name for each field, and those that contradict each other."""
    names = [(alias, name) for alias, name in form.ALIASES.items() if alias in found]
    wrong = [
        f"{alias} is {shown(found[alias])}, but {name} is {shown(found[name])}"
        for alias, name in names
        if found.get(name, found[alias]) != found[alias]
    ]
    return {name: found[alias] for alias, name in names} | found, wrong


def _saved_settings(folder: str, where: str) -> dict:
    """Return the ModelConfig fields of a checkpoint, without those that say how it was cut."""
    manifest = read_manifest(Path(folder))
    try:
        model = build(values_of(manifest.config)).model
    except ValueError as error:
        raise DataError(f"{where}: {NAME}: config: {error}") from None
    values = {one.name: getattr(model, one.name) for one in fields(model) if one.name not in CUTS}
    return {name: value for name, value in values.items() if value is not None}


def _other_values(form, found: dict) -> list[str]:
    """Return fields whose value means that the model computes something else than mpipar's."""
    return [
        f"{key} is {shown(found[key])}; mpipar computes"
        f" {' or '.join('null' if one is None else shown(one) for one in legal)}"
        for key, legal in (NEUTRAL | form.COMPUTED).items()
        if found.get(key, legal[0]) not in legal
    ]


def _out_of_bounds(settings: dict) -> list[str]:
    """Return which values are out of bounds, before anything is built from them."""
    found = (field_problem(FIELDS[name], value) for name, value in settings.items())
    return [text.removeprefix("--") for text in found if text]


def some_names(names: list[str]) -> str:
    """Return the first of these foreign names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(brief, names[:MOST_NAMED])) + more


def start_notes(folder: str, trains: bool = True) -> list[str]:
    """Return notes, in lines, about the weights that a run starts from.

    trains: whether it is a run that dropout would change.
    """
    if is_step(folder):
        return [f"weights: those of the checkpoint {folder}"]
    found, form, _ = _read(folder, f"--init-from {folder}")
    where, notes = f"{folder}/config.json", []
    known = form.READ | form.ALIASES.keys() | NEUTRAL.keys() | OUTSIDE | DROPOUT
    ignored = sorted(key for key in found.keys() - known if found[key] is not None)
    if ignored:
        notes.append(f"{where}: ignored fields: {some_names(ignored)}")
    dropout = ", ".join(
        f"{name} {shown(found[name])}" for name in sorted(DROPOUT) if trains and found.get(name)
    )
    if dropout:
        notes.append(f"{where}: no dropout is applied, although it says {dropout}")
    return notes
