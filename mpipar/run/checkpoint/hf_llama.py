"""Hugging Face's formats of Llama, Mistral and Qwen2: names, and two spellings of rotations.

transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. Both are read,
and must agree; the first is written, which both versions read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpipar.config.text import shown
from mpipar.run.checkpoint.hf_form import Form, number

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE = {"default": (), "linear": ("factor",), "llama3": SCALING}  # type: its parameters


@dataclass(frozen=True)
class RopeForm(Form):
    """The format of a family with rotary positions.

    window(found): how many tokens of a row a query sees, or None. window_fields: what says so.
    """

    window: Callable[[dict], object] = lambda found: None
    window_fields: tuple[str, ...] = ()

    @property
    def READ(self) -> set[str]:
        rope = {"rope_scaling", "rope_parameters", SCALING[-1], "layer_types"}
        return super().READ | rope | {*self.window_fields}

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        scaling = dict(zip(SCALING, model.rope_scaling, strict=False))
        if scaling:
            scaling |= {"rope_type": "llama3", SCALING[-1]: round(scaling[SCALING[-1]])}
        return super().to_json(model, dtype) | {
            "rope_theta": model.rope_theta,
            "rope_scaling": scaling or None,
        }

    def settings(self, found: dict) -> dict:
        """Return the ModelConfig fields that a config.json fixes; raise TypeError."""
        values, window = super().settings(found), self.window(found)
        rope, _ = _rope(self.missing | found)
        if type(window) is int and window > 0:  # mpipar would attend to more tokens than this
            values["seq_len"] = min(values["seq_len"], window)
        return values | {
            "max_positions": values["seq_len"],
            "rope_theta": number("rope_theta", rope["rope_theta"]),
            "rope_scaling": tuple(
                number(key, rope.get(key)) for key in SCALING if rope["rope_type"] == "llama3"
            ),
        }

    def differences(self, found: dict, seq_len: int | None) -> list[str]:
        """Return the values of a config.json that mpipar's layers do not compute. See `Form`."""
        rope, contradictions = _rope(found)
        kind, window = rope["rope_type"], self.window(found)
        partial = rope.get("partial_rotary_factor")
        is_known = kind in ROPE and (kind != "linear" or rope.get("factor") == 1)
        of_kind = {"rope_type", "rope_theta", "partial_rotary_factor", *ROPE.get(kind, ())}
        foreign = [key for key, value in rope.items() if key not in of_kind and value is not None]
        is_window = window is None or (type(window) is int and window > 0)
        types = found.get("layer_types") or ()
        kinds = {*map(str, types)} - {"full_attention", "sliding_attention" if window else ""}
        cases = (
            (
                not is_known,
                (
                    f"rope_type is {shown(kind)}; mpipar computes 'default', 'llama3', and 'linear'"
                    " with factor 1"
                ),
            ),
            (
                is_known and foreign,
                f"rotations of type {shown(kind)} have no {', '.join(map(shown, foreign))}",
            ),
            (
                partial not in (None, 1.0),
                f"partial_rotary_factor is {shown(partial)}; mpipar computes 1.0",
            ),
            (not is_window, f"sliding_window is {shown(window)}, not a number of tokens"),
            (
                is_window and window is not None and (seq_len or 0) > window,
                (
                    f"sliding_window is {window}, below the {seq_len or 0:,} tokens of a row; use"
                    f" --seq-len {window} or less"
                ),
            ),
            (
                len(types) not in (0, found["num_hidden_layers"]),
                f"layer_types has {len(types)} layers, num_hidden_layers another number of them",
            ),
            (
                kinds,
                (
                    f"layer_types has {shown(min(kinds, default=''))}; mpipar computes"
                    " 'full_attention'"
                ),
            ),
        )
        wrong = [*super().differences(found, seq_len), *contradictions]
        return wrong + [text for is_wrong, text in cases if is_wrong]


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


LLAMA = RopeForm(
    kind="llama",
    architecture="LlamaForCausalLM",
    PREFIX="model.",
    blocks="layers",
    names={
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.proj": "self_attn.o_proj",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
        "embedding.tokens": "model.embed_tokens.weight",
        "final_norm.w": "model.norm.weight",
        "head.table": "lm_head.weight",
    },
    first_alone="proj.w",
    numbers={
        "layers": "num_hidden_layers",
        "d_model": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "vocab_size": "vocab_size",
        "longest_row": "max_position_embeddings",
    },
    optional=("kv_heads", "head_dim"),  # the first Llamas do not name kv_heads
    eps="rms_norm_eps",
    always={"norm": "rms", "activation": "swiglu", "positions": "rope", "experts": None},
    biases={
        "none": {"attention_bias": False, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
    missing={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    written={"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None},
    COMPUTED={
        "hidden_act": ("silu", "swish"),
        "attention_dropout": (0.0, None),
        "partial_rotary_factor": (1.0, None),
    },
)
MISTRAL = replace(
    LLAMA,
    kind="mistral",
    architecture="MistralForCausalLM",
    optional=("head_dim",),
    biases={"none": {}},
    window=lambda found: found.get("sliding_window", 4096),
    window_fields=("sliding_window",),
)
QWEN2 = replace(
    MISTRAL,
    kind="qwen2",
    architecture="Qwen2ForCausalLM",
    biases={"qkv": {}},
    window=lambda found: (
        found.get("sliding_window", 4096) if found.get("use_sliding_window") else None
    ),
    window_fields=("sliding_window", "use_sliding_window", "max_window_layers"),
)
