"""Hugging Face's GPT-2 format: names and shapes of the tensors, and config.json."""

from __future__ import annotations

import math

from mpipar.files.text import shown

PREFIX = "transformer."  # which the names in a file may lack
HF_LAYER = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
HF_OTHER = {
    "embedding.tokens": f"{PREFIX}wte.weight",
    "embedding.positions": f"{PREFIX}wpe.weight",
    "final_norm.w": f"{PREFIX}ln_f.weight",
    "final_norm.b": f"{PREFIX}ln_f.bias",
    "head.table": "lm_head.weight",
}
# What mpipar's layers compute; the first value is the default of a missing field. A configuration
# with another value is another model. All of these names are GELU by the hyperbolic tangent.
COMPUTED = {
    "activation_function": (
        "gelu_new",
        "gelu_pytorch_tanh",
        "gelu_fast",
        "gelu_accurate",
        "gelu_python_tanh",
    ),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "n_ctx": "n_positions",
}
# What this format implies about a decoder.
ALWAYS = {
    "arch": "gpt2",
    "norm": "layer",
    "activation": "gelu",
    "positions": "learned",
    "bias": "all",
    "experts": None,
}
READ = {
    *COMPUTED,
    "n_layer",
    "n_embd",
    "n_head",
    "n_inner",
    "n_positions",
    "vocab_size",
    "tie_word_embeddings",
    "layer_norm_epsilon",
}


def tensors(param) -> dict[str, tuple[int, ...]]:
    """Return them as Hugging Face saves a GPT2LMHeadModel: matrices (in, out), biases 1-d."""
    name, shape = param.name, param.shape
    there = HF_OTHER.get(name) or name_in_block(name, f"{PREFIX}h", HF_LAYER)
    if name.endswith(".b"):
        return {there: (math.prod(shape),)}
    if name.endswith("qkv.w"):
        return {there: (shape[0], math.prod(shape[1:]))}
    if name.endswith("proj.w"):
        return {there: (math.prod(shape[:-1]), shape[-1])}
    return {there: shape}


def name_in_block(name: str, blocks: str, layers: dict[str, str]) -> str:
    """Return the name of a block's tensor in a file. blocks: name of the list. layers: of each."""
    block, layer = name.split(".", 1)
    layer, kind = layer.rsplit(".", 1)
    suffix = {"w": "weight", "b": "bias"}[kind]
    return f"{blocks}.{block.removeprefix('block')}.{layers[layer]}.{suffix}"


def describes(model) -> bool:
    """Return whether config.json can say what a completed ModelConfig computes."""
    return all(getattr(model, name, None) == value for name, value in ALWAYS.items()) and (
        model.d_model == model.heads * model.head_dim
    )


def to_json(model, dtype: str) -> dict:
    """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.layers,
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.longest_row,
        "n_ctx": model.longest_row,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def settings(found: dict) -> dict:
    """Return the ModelConfig fields that a config.json fixes; raise KeyError or TypeError."""
    values = {
        "layers": found["n_layer"],
        "d_model": found["n_embd"],
        "heads": found["n_head"],
        "ffn": found.get("n_inner") or 4 * found["n_embd"],
        "vocab_size": found["vocab_size"],
        "seq_len": found["n_positions"],
        "tied": found.get("tie_word_embeddings", True),
    }
    for name, value in values.items():
        if type(value) is not bool if name == "tied" else type(value) is not int or value < 1:
            raise TypeError(f"{name} is {shown(value)}")
    eps = found.get("layer_norm_epsilon", 1e-5)
    if type(eps) not in (int, float):
        raise TypeError(f"layer_norm_epsilon is {shown(eps)}")
    return (
        values
        | ALWAYS
        | {
            "norm_eps": float(eps),
            "kv_heads": values["heads"],
            "head_dim": values["d_model"] // values["heads"],
        }
    )


def differences(found: dict, seq_len: int | None) -> list[str]:
    """Return nothing beside COMPUTED."""
    return []
