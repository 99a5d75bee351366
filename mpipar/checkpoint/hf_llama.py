"""Hugging Face's formats of Llama, Mistral and Qwen2: names, shapes, two spellings of config.json.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. Both are read,
and must agree; the first is written, which both versions read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mpipar.checkpoint.hf_gpt2 import name_in_block
from mpipar.files.text import shown

LAYER = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.proj": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "moe.router": "block_sparse_moe.gate",
}
OTHER = {
    "embedding.tokens": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "head.table": "lm_head.weight",
}
NUMBERS = {  # field of ModelConfig: that of config.json
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE = {"default": (), "linear": ("factor",), "llama3": SCALING}  # type: its parameters
COMPUTED = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (1.0, None),
}


@dataclass(frozen=True)
class LlamaForm:
    """One of the three. See `mpipar.checkpoint.formats` for what a format is.

    kind: its model_type. name: begins its class in transformers. biases: {value of --bias: fields
    of config.json that say so}. window(found): how many tokens of a row a query sees, or None.
    window_fields: the fields that say so.
    """

    kind: str
    name: str
    biases: dict[str, dict[str, bool]]
    window: Callable[[dict], object] = lambda found: None
    window_fields: tuple[str, ...] = ()
    PREFIX = "model."
    NUMBERS = NUMBERS
    COMPUTED = COMPUTED
    ALIASES: ClassVar[dict[str, str]] = {}

    @property
    def READ(self) -> set[str]:
        return {
            *self.COMPUTED,
            *self.NUMBERS.values(),
            "rms_norm_eps",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            SCALING[-1],
            "layer_types",
            *self.window_fields,
            *(key for one in self.biases.values() for key in one),
        }

    def tensors(self, param) -> dict[str, tuple[int, ...]]:
        """Return them as Hugging Face saves a model with head: matrices (out, in), biases 1-d."""
        shape = param.shape
        name = OTHER.get(param.name) or name_in_block(param.name, f"{self.PREFIX}layers", LAYER)
        if param.name.endswith(".b"):
            return {name: (math.prod(shape),)}
        if param.name.endswith("proj.w"):
            return {name: (shape[0], math.prod(shape[1:]))}
        return {name: (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else shape}

    def describes(self, model) -> bool:
        """Return whether config.json can say what a ModelConfig computes."""
        return (
            model.arch == self.kind
            and model.norm == "rms"
            and model.experts is None
            and model.activation == "swiglu"
            and model.positions == "rope"
            and model.bias in self.biases
            and model.d_model % model.heads == 0
        )

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        scaling = dict(zip(SCALING, model.rope_scaling, strict=False))
        if scaling:
            scaling[SCALING[-1]] = round(scaling[SCALING[-1]])
        return {
            "architectures": [f"{self.name}ForCausalLM"],
            "model_type": self.kind,
            **{key: getattr(model, name) for name, key in self.NUMBERS.items()},
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "attention_dropout": 0.0,
            **self.biases[model.bias],
            "sliding_window": None,
            "rope_theta": model.rope_theta,
            "rope_scaling": {"rope_type": "llama3", **scaling} if scaling else None,
            "tie_word_embeddings": model.tied,
            "torch_dtype": dtype,
            "dtype": dtype,
        }

    def settings(self, found: dict) -> dict:
        """Return the ModelConfig fields that a config.json fixes; raise KeyError or TypeError."""
        values = {name: found.get(key) for name, key in self.NUMBERS.items()}
        values["head_dim"] = values["head_dim"] or found["hidden_size"] // (
            found["num_attention_heads"] or 1
        )  # 0 heads are refused below
        if self.kind == "llama":  # the first Llamas do not name kv_heads
            values["kv_heads"] = values["kv_heads"] or values["heads"]
        for name, key in self.NUMBERS.items():
            if type(values[name]) is not int or values[name] < 1:
                raise TypeError(f"{key} is {shown(found.get(key))}")
        tied, eps = found.get("tie_word_embeddings", False), found.get("rms_norm_eps", 1e-6)
        if type(tied) is not bool:
            raise TypeError(f"tie_word_embeddings is {shown(tied)}")
        bias = next(
            (
                name
                for name, fields in self.biases.items()
                if all(found.get(key, False) == value for key, value in fields.items())
            ),
            None,
        )
        rope, _ = _rope(found)
        window = self.window(found)
        if type(window) is int and window > 0:  # mpipar would attend to more tokens than this
            values["max_positions"] = min(values["max_positions"], window)
        return (
            {"experts": None}
            | values
            | {
                "arch": self.kind,
                "norm": "rms",
                "activation": "swiglu",
                "positions": "rope",
                "bias": bias or next(iter(self.biases)),
                "tied": tied,
                "norm_eps": number("rms_norm_eps", eps),
                "seq_len": values["max_positions"],
                "rope_theta": number("rope_theta", rope.get("rope_theta", 10000.0)),
                "rope_scaling": tuple(
                    number(key, rope.get(key)) for key in SCALING if rope["rope_type"] == "llama3"
                ),
            }
        )

    def differences(self, found: dict, seq_len: int | None) -> list[str]:
        """Return the values of a config.json that mpipar's layers do not compute, beside COMPUTED.

        seq_len: tokens per row, if the user has set them.
        """
        (rope, wrong), window = _rope(found), self.window(found)
        kind = rope["rope_type"]
        if kind not in ROPE or (kind == "linear" and rope.get("factor") != 1):
            wrong.append(
                f"rope_type is {shown(kind)}; mpipar computes 'default', 'llama3', and 'linear'"
                " with factor 1"
            )
        else:
            wrong += [
                f"{key} is {shown(value)}, but rotations of type {shown(kind)} have no such number"
                for key, value in rope.items()
                if key not in ("rope_type", "rope_theta", "partial_rotary_factor", *ROPE[kind])
                and value is not None
            ]
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            wrong.append(
                f"partial_rotary_factor is {shown(rope['partial_rotary_factor'])};"
                " mpipar computes 1.0"
            )
        if window is not None and (type(window) is not int or window < 1):
            wrong.append(f"sliding_window is {shown(window)}, not a number of tokens")
        elif window is not None and seq_len is not None and seq_len > window:
            wrong.append(
                f"sliding_window is {window}, below the {seq_len:,} tokens of a row; use"
                f" --seq-len {window} or less"
            )
        count = len(found.get("layer_types") or ())
        if count not in (0, found["num_hidden_layers"]):
            wrong.append(
                f"layer_types has {count} layers, num_hidden_layers another number of them"
            )
        kinds = (
            {*map(str, found.get("layer_types") or ())}
            - {"full_attention"}
            - ({"sliding_attention"} if window else set())
        )
        if kinds:
            wrong.append(f"layer_types has {shown(min(kinds))}; mpipar computes 'full_attention'")
        flags = {key: found.get(key, False) for one in self.biases.values() for key in one}
        if flags and flags not in self.biases.values():
            wrong.append(
                f"{', '.join(f'{key} is {shown(flags[key])}' for key in flags)}; mpipar"
                " computes both true or both false"
            )
        return wrong


def _rope(found: dict) -> tuple[dict, list[str]]:
    """Return what config.json says about rotations, and contradictions in it; raise TypeError.

    It has up to four places for the same thing; no place wins over another one.
    """
    rope, wrong, place_of = {}, [], {}
    above = {key: found[key] for key in ("rope_theta", SCALING[-1]) if key in found}
    places = {"config.json": above} | {
        key: found[key] for key in ("rope_parameters", "rope_scaling") if found.get(key) is not None
    }
    for place, said in places.items():
        if not isinstance(said, dict) or any(isinstance(one, dict | list) for one in said.values()):
            raise TypeError(f"{place} is {shown(said)}")
        for key, value in said.items():
            name = "rope_type" if key == "type" else key
            if rope.get(name, value) != value:
                wrong.append(
                    f"{name} is {shown(rope[name])} in {place_of[name]}, and {shown(value)} in"
                    f" {place}; write one of them"
                )
            rope[name], place_of[name] = value, place
    return {"rope_type": "default"} | rope, wrong


def number(key: str, value) -> float:
    """Return the value of a field of config.json; TypeError if it is not a number."""
    if type(value) not in (int, float):
        raise TypeError(f"{key} is {shown(value)}")
    return float(value)


LLAMA = LlamaForm(
    "llama",
    "Llama",
    {
        "none": {"attention_bias": False, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
)
MISTRAL = LlamaForm(
    "mistral",
    "Mistral",
    {"none": {}},
    window=lambda found: found.get("sliding_window", 4096),
    window_fields=("sliding_window",),
)
QWEN2 = LlamaForm(
    "qwen2",
    "Qwen2",
    {"qkv": {}},
    window=lambda found: (
        found.get("sliding_window", 4096) if found.get("use_sliding_window") else None
    ),
    window_fields=("sliding_window", "use_sliding_window", "max_window_layers"),
)
