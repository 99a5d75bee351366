"""Architectures: for each name the values that its decoders have, as far as the user names none."""

_LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": "none", "tied": False}

ARCHS = {
    "gpt2": {},  # the defaults of the fields
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA | {"rope_theta": 1e6, "experts": 8},
    "qwen2": _LLAMA | {"norm_eps": 1e-6, "bias": "qkv", "rope_theta": 1e6},
}
