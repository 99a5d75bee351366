"""Named starting points: the fields that differ from the defaults, with their values."""

LARGE = {  # what models of GPT-2's size and more have in common
    "seq_len": 1024,
    "batch_size": 512,
    "num_microbatches": 8,
    "lr": 6e-4,
    "warmup_steps": 700,
    "steps": 20000,
}


def _gpt2(layers, d_model, heads):
    return LARGE | {"layers": layers, "d_model": d_model, "heads": heads, "vocab_size": 50257}


def _llama(layers, d_model, heads, **shape):
    own = {"arch": "llama", "layers": layers, "d_model": d_model, "heads": heads}
    return LARGE | own | {"vocab_size": 32000} | shape


def _llama3(layers, d_model, heads, factor=8.0, **shape):
    """Return the fields of Llama 3.1 and 3.2, at the row length of their first training."""
    return (
        _llama(
            layers,
            d_model,
            heads,
            kv_heads=8,
            vocab_size=128256,
            seq_len=8192,
            rope_theta=5e5,
            rope_scaling=(factor, 1.0, 4.0, 8192.0),
            batch_size=128,
            lr=3e-4,
        )
        | shape
    )


def _mixtral(layers, d_model, heads, **shape):
    return _llama(
        layers,
        d_model,
        heads,
        arch="mixtral",
        kv_heads=8,
        seq_len=4096,
        router_loss_coef=0.02,
        lr=3e-4,
        **shape,
    )


PRESETS = {
    "tiny": {"batch_size": 16, "num_microbatches": 4},
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Shapes that train on a workstation, as in llama2.c.
    "llama-15m": _llama(6, 288, 6, ffn=768, seq_len=256, tied=True, batch_size=128),
    "llama-110m": _llama(12, 768, 12, ffn=2048, tied=True),
    "llama-1b": _llama3(16, 2048, 32, 32.0, ffn=8192, tied=True),
    "llama-8b": _llama3(32, 4096, 32, ffn=14336),
    "llama-70b": _llama3(80, 8192, 64, ffn=28672),
    # A mixture of experts that trains in a minute on a CPU.
    "moe-tiny": {
        "arch": "llama",
        "layers": 4,
        "ffn": 256,
        "experts": 8,
        "expert_ffn": 128,
        "batch_size": 16,
        "num_microbatches": 4,
    },
    # For planning.
    "llama-405b": _llama3(126, 16384, 128, ffn=53248),
    "mixtral-8x7b": _mixtral(32, 4096, 32, ffn=14336, max_positions=32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, ffn=16384, vocab_size=32768, max_positions=65536),
    "gpt3-175b": _gpt2(96, 12288, 96) | {"seq_len": 2048, "batch_size": 1536},
    # MPT uses ALiBi instead of positions. Learned ones come closest: they add T D numbers.
    "mpt-30b": _gpt2(48, 7168, 64) | {"seq_len": 8192, "vocab_size": 50432, "bias": "none"},
}
