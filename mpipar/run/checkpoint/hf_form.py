"""What Hugging Face's formats have in common: a table per family; and that of GPT-2."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mpipar.config.text import shown

DEFAULTS = {  # fields of ModelConfig that config.json may lack
    "ffn": lambda values: 4 * values["d_model"],
    "kv_heads": lambda values: values["heads"],
    "head_dim": lambda values: values["d_model"] // values["heads"],
}


@dataclass(frozen=True)
class Form:
    """The format of a family. See `mpipar.run.checkpoint.formats` for what a format is.

    kind: its model_type. architecture: its class in transformers. blocks: begins the names of a
    block's tensors. names: {layer, or parameter outside of the blocks: its name}. first_alone: ends
    the names of parameters that have their first axis alone as rows of a matrix; the others have
    their last axis alone as its columns. numbers: {field of ModelConfig: that of config.json}, in
    an order in which those that may be missing follow what they depend on; optional: those. eps:
    the field of the norms' epsilon. always: what the family implies about a ModelConfig. biases:
    {value of --bias: fields of config.json that say so}. missing: values of missing fields.
    written: fields that are always written. copies: {field of config.json: that of ModelConfig} of
    numbers that are written a second time.
    """

    kind: str
    architecture: str
    PREFIX: str
    blocks: str
    names: dict[str, str]
    first_alone: str
    numbers: dict[str, str]
    optional: tuple[str, ...]
    eps: str
    always: dict[str, object]
    biases: dict[str, dict[str, bool]]
    missing: dict[str, object]
    written: dict[str, object]
    COMPUTED: dict[str, tuple]
    ALIASES: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    @property
    def READ(self) -> set[str]:
        flags = (key for one in self.biases.values() for key in one)
        return {*self.COMPUTED, *self.numbers.values(), *self.missing, *flags}

    def tensors(self, param) -> dict[str, tuple[int, ...]]:
        """Return them as Hugging Face saves a model with head: two axes, biases and norms one."""
        shape, name = param.shape, self.names.get(param.name)
        if name is None:
            block, layer = param.name.removeprefix("block").split(".", 1)
            layer, kind = layer.rsplit(".", 1)
            suffix = {"w": "weight", "b": "bias"}[kind]
            name = f"{self.PREFIX}{self.blocks}.{block}.{self.names[layer]}.{suffix}"
        if len(shape) == 1 or param.name.endswith(".b"):
            return {name: (math.prod(shape),)}
        if param.name.endswith(self.first_alone):
            return {name: (shape[0], math.prod(shape[1:]))}
        return {name: (math.prod(shape[:-1]), shape[-1])}

    def describes(self, model) -> bool:
        """Return whether config.json can say what a completed ModelConfig computes."""
        implied = self.always | {"arch": self.kind}
        for name in DEFAULTS.keys() - self.numbers.keys():
            implied[name] = DEFAULTS[name](vars(model))
        return (
            model.bias in self.biases
            and model.d_model % model.heads == 0
            and all(getattr(model, name) == value for name, value in implied.items())
        )

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            **{key: getattr(model, name) for name, key in self.numbers.items()},
            self.eps: model.norm_eps,
            **self.biases[model.bias],
            **self.written,
            **{key: getattr(model, name) for key, name in self.copies.items()},
            "tie_word_embeddings": model.tied,
            "torch_dtype": dtype,
            "dtype": dtype,
        }

    def settings(self, found: dict) -> dict:
        """Return the ModelConfig fields that a config.json fixes; raise TypeError."""
        found, values = self.missing | found, {}
        for name, key in self.numbers.items():
            value = found.get(key)
            if value is None and name in self.optional:
                value = DEFAULTS[name](values)
            if type(value) is not int or value < 1:
                raise TypeError(f"{key} is {shown(found.get(key))}")
            values[name] = value
        values["seq_len"] = values.pop("longest_row")
        tied, flags = found["tie_word_embeddings"], self.flags(found)
        if type(tied) is not bool:
            raise TypeError(f"tie_word_embeddings is {shown(tied)}")
        biases = [name for name, fields in self.biases.items() if fields == flags]
        return (
            {name: default(values) for name, default in DEFAULTS.items() if name not in values}
            | values
            | self.always
            | {
                "arch": self.kind,
                "bias": (biases or [*self.biases])[0],
                "tied": tied,
                "norm_eps": number(self.eps, found[self.eps]),
            }
        )

    def flags(self, found: dict) -> dict:
        """Return the fields of a config.json that say which products add a bias."""
        return {key: found.get(key, False) for one in self.biases.values() for key in one}

    def differences(self, found: dict, seq_len: int | None) -> list[str]:
        """Return the values of a config.json that mpipar's layers do not compute, beside COMPUTED.

        seq_len: tokens per row, if the user has set them.
        """
        flags = self.flags(found)
        if flags in self.biases.values():
            return []
        said = ", ".join(f"{key} is {shown(flags[key])}" for key in flags)
        return [f"{said}; mpipar computes both true or both false"]


def number(key: str, value) -> float:
    """Return the value of a field of config.json; TypeError if it is not a number."""
    if type(value) not in (int, float):
        raise TypeError(f"{key} is {shown(value)}")
    return float(value)


GPT2 = Form(
    kind="gpt2",
    architecture="GPT2LMHeadModel",
    PREFIX="transformer.",
    blocks="h",
    names={
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
        "ffn.up": "mlp.c_fc",
        "ffn.down": "mlp.c_proj",
        "embedding.tokens": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        "final_norm.w": "transformer.ln_f.weight",
        "final_norm.b": "transformer.ln_f.bias",
        "head.table": "lm_head.weight",
    },
    first_alone="qkv.w",
    numbers={
        "layers": "n_layer",
        "d_model": "n_embd",
        "heads": "n_head",
        "ffn": "n_inner",
        "longest_row": "n_positions",
        "vocab_size": "vocab_size",
    },
    optional=("ffn",),
    eps="layer_norm_epsilon",
    always={
        "norm": "layer",
        "activation": "gelu",
        "positions": "learned",
        "experts": None,
    },
    biases={"all": {}},
    missing={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    written={
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    COMPUTED={  # all of these names are GELU by the hyperbolic tangent
        "activation_function": (
            "gelu_new",
            "gelu_pytorch_tanh",
            "gelu_fast",
            "gelu_accurate",
            "gelu_python_tanh",
        ),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    ALIASES={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "n_ctx": "n_positions",
    },
    copies={"n_ctx": "longest_row"},
)
