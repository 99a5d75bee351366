"""mpipar's own format for models that Hugging Face's do not cover, such as mixed ones.

Tensors have the names and shapes of the parameters. config.json holds the fields of the model.
"""

from __future__ import annotations

from dataclasses import fields

from mpipar.config.model import CUTS, ModelConfig
from mpipar.config.names import CONSTANT
from mpipar.config.sections import not_taken
from mpipar.config.setting import kind
from mpipar.config.text import shown

PREFIX = ""  # of the names
KIND = "mpipar-decoder"  # the model_type
COMPUTED: dict[str, tuple] = {  # what earlier versions could state besides, and its one value
    name: (CONSTANT[name],) for name in ("routing", "router_bias_rate")
}
ALIASES: dict[str, str] = {}


OF_WEIGHTS = [one for one in fields(ModelConfig) if one.name not in CUTS]  # they fix these fields
READ = {one.name for one in OF_WEIGHTS} | COMPUTED.keys()


def tensors(param) -> dict[str, tuple[int, ...]]:
    """Return the parameter itself: qkv's weight is (D, 3, H, d)."""
    return {param.name: param.shape}


def to_json(model, dtype: str) -> dict:
    """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
    values = vars(model)
    return {
        "model_type": KIND,
        "torch_dtype": dtype,
        **{
            one.name: values[one.name]
            for one in OF_WEIGHTS
            if values[one.name] is not None and not_taken(one.name, values) is None
        },
    }


def settings(found: dict) -> dict:
    """Return the ModelConfig fields that a config.json fixes; raise KeyError or TypeError."""
    given = {one.name: _value(one, found[one.name]) for one in OF_WEIGHTS if one.name in found}
    values = {one.name: one.default for one in OF_WEIGHTS} | given
    lacking = {
        one.name
        for one in OF_WEIGHTS
        if one.default is not None and not_taken(one.name, values) is None
    } - given.keys()
    if lacking:
        raise KeyError(min(lacking))
    return given


def _value(field, raw):
    """Return the value of a field; TypeError if it has another type."""
    base, is_tuple = kind(field)
    values = raw if is_tuple and type(raw) is list else [raw]
    if any(type(one) is not base for one in values):
        raise TypeError(f"{field.name} is {shown(raw)}")
    return tuple(values) if is_tuple else raw


def differences(found: dict, seq_len: int | None) -> list[str]:
    """Return nothing: this format cannot state what mpipar's layers do not compute."""
    return []
