"""Named starting points: the fields that are not the default, with their values."""


def _gpt2(layers, d_model, heads):
    return {"layers": layers, "d_model": d_model, "heads": heads, "seq_len": 1024,
            "vocab_size": 50257, "batch_size": 512, "num_microbatches": 8, "lr": 6e-4,
            "warmup_steps": 700, "steps": 20000}


PRESETS = {
    "tiny": {"batch_size": 16, "num_microbatches": 4},
    "digits": {
        "model": "convnet", "layers": 2, "channels": 32, "classes": 10, "batch_size": 64,
        "num_microbatches": 4, "steps": 200},
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
}

OF_MODEL = {"decoder": "tiny", "convnet": "digits"}  # without --preset


def preset_problems(preset: str, model: str) -> list[str]:
    """What is wrong with a preset for a model; both are known names."""
    made_for = PRESETS[preset].get("model", "decoder")
    if made_for == model:
        return []
    return [(f"--preset {preset}: is a {made_for}, but --model is {model}; use --preset"
             f" {OF_MODEL[model]}, or leave one of them out")]
