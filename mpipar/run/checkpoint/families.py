"""Hugging Face's families of models: a table for each, and what all tables mean.

A new family is a table at the end of this file, as long as mpipar's layers compute it. Rotations:
transformers 4 writes `rope_theta` and `rope_scaling`, version 5 `rope_parameters`. Both are read,
and must agree; the first is written, which both versions read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from mpipar.config.model import CUT_SETTINGS, ModelConfig
from mpipar.config.sections import not_taken
from mpipar.config.text import shown
from mpipar.errors import broken
from mpipar.run.files.bounded import built

DEFAULTS = {  # fields of ModelConfig that config.json may lack
    "ffn": lambda values: 4 * values["d_model"],
    "kv_heads": lambda values: values["heads"],
    "head_dim": lambda values: values["d_model"] // values["heads"],
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE = {"default": (), "linear": ("factor",), "llama3": SCALING}  # type: its parameters
OF_ROPE = {"rope_scaling", "rope_parameters", SCALING[-1], "layer_types"}
ROUTER = "router_aux_loss_coef"
SUFFIX = {"w": "weight", "b": "bias"}
# The fields of ModelConfig that every config.json can say, and those of rotations and of experts.
SAID = {"arch", "bias", "tied", "norm_eps", "seq_len", "max_positions", *DEFAULTS}
ROTATIONS, ROUTING = {"rope_theta", "rope_scaling"}, {"router_balance", "router_loss_coef"}


@dataclass(frozen=True)
class Family:
    """The format of a family. See `mpipar.run.checkpoint.formats` for what a format is.

    kind: its model_type. architecture: its class in transformers. blocks: begins the names of a
    block's tensors. names: {layer, or parameter outside of the blocks: its name}. first_alone: ends
    the names of parameters that have their first axis alone as rows of a matrix; the others have
    their last axis alone as its columns. experts: {parameter: the matrices that each expert has of
    it in the files, in order}. numbers: {field of ModelConfig: that of config.json}, in an order in
    which those that may be missing follow what they depend on; optional: those. eps: the field of
    the norms' epsilon. always: what the family fixes in a ModelConfig. biases: {value of
    --bias: fields of config.json that say so}. missing: values of missing fields. written: fields
    that are always written. copies: {field of config.json: that of ModelConfig} of numbers that are
    written a second time.
    """

    kind: str
    architecture: str
    prefix: str
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
    computed: dict[str, tuple]
    copies: dict[str, str] = field(default_factory=dict)
    experts: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def rotates(self) -> bool:
        """Whether positions are rotations."""
        return self.always["positions"] == "rope"

    @property
    def read(self) -> set[str]:
        """The fields of config.json that are read."""
        flags = (key for one in self.biases.values() for key in one)
        own = {*self.computed, *self.numbers.values(), *self.copies, *self.missing, *flags}
        return own | OF_ROPE if self.rotates else own

    @property
    def implied(self) -> dict[str, object]:
        """What it says of a ModelConfig in any case: `always`, and defaults of unknown fields."""
        said = SAID | CUT_SETTINGS | self.numbers.keys()
        said |= ROTATIONS if self.rotates else set()
        said |= ROUTING if self.experts else set()
        unknown = [one for one in fields(ModelConfig) if one.name not in said]
        return {one.name: one.default for one in unknown} | self.always

    def tensors(self, param) -> dict[str, tuple[int, ...]]:
        """Return them as Hugging Face saves a model with head: two axes, biases and norms one.

        Those of experts follow each other, although transformers 5 has them together in memory.
        """
        shape, name = param.shape, self.names.get(param.name)
        block, _, layer = param.name.removeprefix("block").partition(".")
        start = f"{self.prefix}{self.blocks}.{block}"
        if layer in self.experts:
            return {
                f"{start}.block_sparse_moe.experts.{expert}.{matrix}.weight": shape[-2:]
                for expert in range(shape[0])
                for matrix in self.experts[layer]
            }
        if name is None:
            layer, _, kind = layer.rpartition(".")
            name = f"{start}.{self.names[layer]}.{SUFFIX[kind]}"
        if len(shape) == 1 or param.name.endswith(".b"):
            return {name: (math.prod(shape),)}
        if param.name.endswith(self.first_alone):
            return {name: (shape[0], math.prod(shape[1:]))}
        return {name: (math.prod(shape[:-1]), shape[-1])}

    def describes(self, model) -> bool:
        """Return whether config.json can say what a completed ModelConfig computes."""
        values, usual = vars(model), DEFAULTS.keys() - self.numbers.keys()
        implied = {name: DEFAULTS[name](values) for name in usual} | self.implied
        return (
            (model.arch, model.bias) in [(self.kind, bias) for bias in self.biases]
            and model.d_model % model.heads == 0
            and all(
                values[name] == value
                for name, value in implied.items()
                if not_taken(name, values) is None
            )
            and (not self.experts or (model.experts and model.router_balance in ("loss", "none")))
        )

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        found = {
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
        if self.rotates:
            scaling = model.rope_scaling and {
                **dict(zip(SCALING, model.rope_scaling, strict=True)),
                SCALING[-1]: round(model.rope_scaling[-1]),
                "rope_type": "llama3",
            }
            found |= {"rope_theta": model.rope_theta, "rope_scaling": scaling or None}
        if self.experts:
            found[ROUTER] = model.router_loss_coef if model.router_balance == "loss" else 0.0
        return found

    def settings(self, found: dict, seq_len: int | None) -> tuple[dict, list[str]]:
        """Return the ModelConfig fields that a config.json fixes, and what is not computed of it.

        That is besides `computed`. seq_len: tokens per row, if the user has set them. Raises
        ValueError.
        """
        said, values = self.missing | {key: found[key] for key in self.read & found.keys()}, {}
        for name, key in self.numbers.items():
            value = said.get(key)
            if value is None and name in self.optional:
                value = DEFAULTS[name](values)
            if type(value) is not int or value < 1:
                raise ValueError(f"{key} is {shown(said.get(key))}")
            values[name] = value
        flags = {key: said.get(key, False) for one in self.biases.values() for key in one}
        biases = [name for name, one in self.biases.items() if one == flags]
        text = ", ".join(f"{key} is {shown(value)}" for key, value in flags.items())
        wrong = broken((not biases, f"{text}; mpipar computes both true or both false"))
        values["seq_len"] = values.pop("longest_row")
        values = {
            **{name: default(values) for name, default in DEFAULTS.items() if name not in values},
            **values,
            **self.implied,
            "arch": self.kind,
            "bias": biases[0] if biases else "none",
            "tied": built(bool, said["tie_word_embeddings"], "tie_word_embeddings"),
            "norm_eps": built(float, said[self.eps], self.eps),
        }
        if self.rotates:
            wrong += self._rotations(found, said, values, seq_len)
        if self.experts:
            coef = built(float, said[ROUTER], ROUTER)
            values["router_balance"] = "loss" if coef else "none"
            values |= {"router_loss_coef": coef} if coef else {}
        taken = {name: one for name, one in values.items() if not_taken(name, values) is None}
        return taken, wrong

    def _rotations(self, found: dict, said: dict, values: dict, seq_len: int | None) -> list[str]:
        """Add what a config.json says about rotations and windows to the ModelConfig fields.

        said: its fields that are read, and the values of missing ones. Return what is not computed.
        """
        rope, wrong = _rope(found)
        kind, partial = rope["rope_type"], rope.get("partial_rotary_factor")
        of_kind = {"rope_type", "rope_theta", "partial_rotary_factor", *ROPE.get(kind, rope)}
        foreign = [key for key, value in rope.items() if key not in of_kind and value is not None]
        window = said.get("sliding_window") if said.get("use_sliding_window", True) else None
        if built(int | None, window, "sliding_window") is not None:
            values["seq_len"] = min(values["seq_len"], window)  # it would attend to more tokens
        types = built(tuple[str, ...], said.get("layer_types") or [], "layer_types")
        kinds = {*types} - {"full_attention", "sliding_attention" if window else ""}
        values["max_positions"] = values["seq_len"]
        values["rope_theta"] = built(
            float, rope.get("rope_theta", said["rope_theta"]), "rope_theta"
        )
        scaling = SCALING if kind == "llama3" else ()
        values["rope_scaling"] = tuple(built(float, rope.get(key), key) for key in scaling)
        return wrong + broken(
            (
                kind not in ROPE or (kind == "linear" and rope.get("factor") != 1),
                (
                    f"rope_type is {shown(kind)}; mpipar computes 'default', 'llama3', and 'linear'"
                    " with factor 1"
                ),
            ),
            (foreign, f"rotations of type {shown(kind)} have no {', '.join(map(shown, foreign))}"),
            (
                partial not in (None, 1.0),
                f"partial_rotary_factor is {shown(partial)}; mpipar computes 1.0",
            ),
            (
                window and (seq_len or 0) > window,
                (
                    f"sliding_window is {window}, below the {seq_len or 0:,} tokens of a row; use"
                    f" --seq-len {window} or less"
                ),
            ),
            (
                kinds,
                (
                    f"layer_types has {shown(min(kinds, default=''))}; mpipar computes"
                    " 'full_attention'"
                ),
            ),
        )


def _rope(found: dict) -> tuple[dict, list[str]]:
    """Return what config.json says about rotations, and contradictions in it; raise ValueError.

    It has up to four places for the same thing; no place wins over another one.
    """
    rope, wrong, place_of = {}, [], {}
    above = {key: found[key] for key in ("rope_theta", SCALING[-1]) if key in found}
    places = {"config.json": above} | {
        key: found[key] for key in ("rope_parameters", "rope_scaling") if found.get(key) is not None
    }
    for place, said in places.items():
        if not isinstance(said, dict) or any(isinstance(one, dict | list) for one in said.values()):
            raise ValueError(f"{place} is {shown(said)}")
        for key, value in said.items():
            name = "rope_type" if key == "type" else key
            if rope.get(name, value) != value:
                wrong.append(
                    f"{name} is {shown(rope[name])} in {place_of[name]}, and {shown(value)} in"
                    f" {place}; write one of them"
                )
            rope[name], place_of[name] = value, place
    return {"rope_type": "default"} | rope, wrong


GPT2 = Family(
    kind="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
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
    always={"norm": "layer", "activation": "gelu", "positions": "learned"},
    biases={"all": {}},
    missing={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    written={
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    computed={  # all of these names are GELU by the hyperbolic tangent
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
    copies={"n_ctx": "longest_row"},
)
LLAMA = Family(
    kind="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
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
    always={"norm": "rms", "activation": "swiglu", "positions": "rope"},
    biases={
        "none": {"attention_bias": False, "mlp_bias": False},
        "all": {"attention_bias": True, "mlp_bias": True},
    },
    missing={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    written={"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None},
    computed={
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
    missing=LLAMA.missing | {"sliding_window": 4096},
)
QWEN2 = replace(
    MISTRAL,
    kind="qwen2",
    architecture="Qwen2ForCausalLM",
    biases={"qkv": {}},
    missing=MISTRAL.missing | {"use_sliding_window": False, "max_window_layers": None},
)
MIXTRAL = replace(
    MISTRAL,
    kind="mixtral",
    architecture="MixtralForCausalLM",
    names=MISTRAL.names | {"moe.router": "block_sparse_moe.gate"},
    experts={"moe.up.w": ("w1", "w3"), "moe.down.w": ("w2",)},  # w1 is the gate
    numbers=MISTRAL.numbers
    | {
        "expert_ffn": "intermediate_size",
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    missing=MISTRAL.missing
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None, ROUTER: 0.001},
    computed=MISTRAL.computed | {"router_jitter_noise": (0.0, None)},
)
