"""Formats of models on disk, and what a config.json or a checkpoint says about a model.

Those of Hugging Face are tables in `mpipar.run.checkpoint.families`; `Own` is mpipar's, and shows
what a format has. kind: the model_type. prefix: begins the names of tensors, and may be missing in
a file. computed: {field of config.json: values that mpipar computes, the first one if the field is
missing}. read: all fields that are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

from mpipar.config.model import CUT_SETTINGS, ModelConfig
from mpipar.config.names import CONSTANT
from mpipar.config.sections import FIELDS, build, not_taken
from mpipar.config.setting import field_problem
from mpipar.config.text import brief, shown
from mpipar.errors import DataError
from mpipar.run.checkpoint.families import GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2
from mpipar.run.checkpoint.manifest import NAME, STEP_FOLDER, read_manifest
from mpipar.run.files.bounded import built, problems_as, read_json
from mpipar.run.files.settings import values_of

# The fields that weights fix.
OF_WEIGHTS = [one for one in fields(ModelConfig) if one.name not in CUT_SETTINGS]


class Own:
    """The format of models that Hugging Face's do not cover, such as mixed ones.

    Tensors have the names and shapes of the parameters. config.json holds the fields of the model.
    """

    kind = "mpipar-decoder"
    prefix = ""
    # What earlier versions could state besides, and its one value.
    computed: ClassVar[dict[str, tuple]] = {
        name: (CONSTANT[name],) for name in ("routing", "router_bias_rate")
    }
    read: ClassVar[set[str]] = {one.name for one in OF_WEIGHTS} | computed.keys()

    def describes(self, model) -> bool:
        """Return whether config.json can say what a completed ModelConfig computes."""
        return True

    def tensors(self, param) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of the tensors in the files that hold a parameter's numbers.

        They follow one another; here it is the parameter itself: qkv's weight is (D, 3, H, d).
        """
        return {param.name: param.shape}

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        values = vars(model)
        return {
            "model_type": self.kind,
            "torch_dtype": dtype,
            **{
                one.name: values[one.name]
                for one in OF_WEIGHTS
                if values[one.name] is not None and not_taken(one.name, values) is None
            },
        }

    def settings(self, found: dict, seq_len: int | None) -> tuple[dict, list[str]]:
        """Return the ModelConfig fields that a config.json fixes; raise ValueError.

        This format cannot state what mpipar's layers do not compute, so the list of that is empty.
        """
        return {
            one.name: built(one.type, found[one.name], one.name)
            for one in OF_WEIGHTS
            if one.name in found
        }, []


OWN = Own()
FORMS = {form.kind: form for form in (GPT2, LLAMA, MISTRAL, QWEN2, MIXTRAL, OWN)}
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
# Every published GPT-2 says 0.1, so it is no reason to refuse one; a run that trains it is told.
DROPOUT = {"attn_pdrop", "embd_pdrop", "resid_pdrop"}
MOST_NAMED = 12  # ignored fields in a line


def format_of(model):
    """Return a ModelConfig's format: Hugging Face's if that can describe it, else mpipar's."""
    return next(form for form in FORMS.values() if form.describes(model))


def file_rows(
    tensors: dict[str, tuple[int, ...]], first: int, stop: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first, stop): which rows of which tensor in the files hold [first, stop).

    first, stop: numbers of a parameter. tensors: the parameter's, see `Own.tensors`.
    """
    start = 0
    for name, shape in tensors.items():
        end, row = start + math.prod(shape), math.prod(shape[1:])
        if first < end and start < stop:
            yield name, max(first - start, 0) // row, (min(stop, end) - start) // row
        start = end


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
    form, found = _read(folder, where)
    different = [
        f"{key} is {shown(found[key])}; mpipar computes"
        f" {' or '.join('null' if one is None else shown(one) for one in legal)}"
        for key, legal in (NEUTRAL | form.computed).items()
        if found.get(key, legal[0]) not in legal
    ]
    with problems_as(DataError, f"{where}: config.json: is not a {form.kind} configuration"):
        settings, others = form.settings(found, seq_len)
    # What is out of bounds is told before anything is built from it.
    bounds = (field_problem(FIELDS[name], value) for name, value in settings.items())
    different += [*others, *(text.removeprefix("--") for text in bounds if text)]
    if different:
        raise DataError([f"{where}: config.json: {text}" for text in different])
    return settings


def _read(folder: str, where: str):
    """Return (format, content) of folder/config.json. where: begins each message."""
    where += ": config.json"
    found = read_json(Path(folder) / "config.json", where=where)
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind not in [*FORMS]:
        raise DataError(f"{where}: model_type is {shown(kind)}; mpipar computes {', '.join(FORMS)}")
    return FORMS[kind], found


def _saved_settings(folder: str, where: str) -> dict:
    """Return the ModelConfig fields of a checkpoint, without those that say how it was cut."""
    manifest = read_manifest(Path(folder))
    with problems_as(DataError, f"{where}: {NAME}: config"):
        model = build(values_of(manifest.config)).model
    return {
        one.name: value for one in OF_WEIGHTS if (value := getattr(model, one.name)) is not None
    }


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
    form, found = _read(folder, f"--init-from {folder}")
    silent = {key for key in DROPOUT if not (trains and found.get(key))}
    known = form.read | NEUTRAL.keys() | OUTSIDE | silent
    ignored = sorted(key for key in found.keys() - known if found[key] is not None)
    return [f"{folder}/config.json: ignored fields: {some_names(ignored)}"] if ignored else []
