"""A second GPT-2, from its paper and Hugging Face's file layout alone: weights, file, logits.

It uses nothing of mpipar. Letters: T tokens, D width, F ffn width, V vocabulary, H heads.
"""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def shapes(layers, D, F, T, V, tied) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of GPT2LMHeadModel's file, without the prefix `transformer.`."""
    found = {"wte.weight": (V, D), "wpe.weight": (T, D)}
    for i in range(layers):
        for name, shape in {
            "ln_1.weight": (D,), "ln_1.bias": (D,),
            "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
            "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,),
            "ln_2.weight": (D,), "ln_2.bias": (D,),
            "mlp.c_fc.weight": (D, F), "mlp.c_fc.bias": (F,),
            "mlp.c_proj.weight": (F, D), "mlp.c_proj.bias": (D,),
        }.items():  # fmt: skip
            found[f"h.{i}.{name}"] = shape
    found |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
    return found if tied else found | {"lm_head.weight": (V, D)}


def random_weights(rng, layers, D, F, T, V, tied) -> dict[str, np.ndarray]:
    """Return a model in which no tensor is zero or one, so that none can be left out unseen."""
    return {
        name: rng.normal(1.0 if "ln_" in name and "weight" in name else 0.0, 0.3, shape)
        for name, shape in shapes(layers, D, F, T, V, tied).items()
    }


def configuration(layers, D, F, T, V, heads, tied) -> dict:
    """Return config.json as Hugging Face writes it, with fields that do not matter here."""
    return {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": T, "n_embd": D, "n_head": heads, "n_inner": None if F == 4 * D else F,
        "n_layer": layers, "n_positions": T, "resid_pdrop": 0.1, "vocab_size": V,
        **({} if tied else {"tie_word_embeddings": False}),
    }  # fmt: skip


def write_file(path: Path, tensors, dtype="F64", prefix="") -> None:
    """Write a safetensors file."""
    save_file(
        {
            name if name.startswith("lm_head") else prefix + name: np.ascontiguousarray(
                x.astype(DTYPES[dtype])
            )
            for name, x in tensors.items()
        },
        path,
        {"format": "pt"},
    )


def write_model(folder: Path, tensors, config, dtype="F64", prefix="") -> None:
    """Write model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", tensors, dtype, prefix)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def norm(x, w, b):
    """Layer normalization over the last axis, eps 1e-5."""
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * w + b


def gelu(x):
    """GELU in its tanh form, Hugging Face's gelu_new."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(weights, heads: int, ids) -> np.ndarray:
    """Return the logits (T, V) of one row of token ids (T,), in float64."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    D = x.shape[1]
    d = D // heads
    future = np.triu(np.ones((len(ids), len(ids)), bool), 1)
    for i in range(sum(name.endswith("ln_1.bias") for name in w)):

        def get(name, i=i):
            return w[f"h.{i}.{name}"]

        h = norm(x, get("ln_1.weight"), get("ln_1.bias"))
        qkv = h @ get("attn.c_attn.weight") + get("attn.c_attn.bias")
        merged = np.empty_like(x)
        for head in range(heads):
            q, k, v = (qkv[:, part * D + head * d : part * D + (head + 1) * d] for part in range(3))
            scores = np.where(future, -np.inf, q @ k.T / math.sqrt(d))
            e = np.exp(scores - scores.max(-1, keepdims=True))
            merged[:, head * d : (head + 1) * d] = e / e.sum(-1, keepdims=True) @ v
        x = x + merged @ get("attn.c_proj.weight") + get("attn.c_proj.bias")
        h = gelu(
            norm(x, get("ln_2.weight"), get("ln_2.bias")) @ get("mlp.c_fc.weight")
            + get("mlp.c_fc.bias")
        )
        x = x + h @ get("mlp.c_proj.weight") + get("mlp.c_proj.bias")
    return norm(x, w["ln_f.weight"], w["ln_f.bias"]) @ w.get("lm_head.weight", w["wte.weight"]).T


def greedy(weights, heads: int, ids: list[int], count: int, T: int) -> list[int]:
    """Return `count` further tokens, each the likeliest, with the last T tokens as context."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(np.argmax(logits(weights, heads, np.array(ids[-T:]))[-1])))
    return ids[-count:]
