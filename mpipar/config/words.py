"""Names that people type: what other programs call a setting, and examples of values."""

from mpipar.config.setting import flag
from mpipar.errors import suggestion

SYNONYMS = {  # other programs' names, for the hint only
    "learning_rate": "lr", "num_layers": "layers", "n_layer": "layers", "hidden_size": "d_model",
    "width": "d_model", "n_embd": "d_model", "num_heads": "heads", "n_head": "heads",
    "block_size": "seq_len", "context": "seq_len", "global_batch": "batch_size",
    "max_steps": "steps", "grad_clip": "clip", "output": "out", "name": "run_name",
}
COUNTERPARTS = {  # what the other family of models calls it
    "d_model": "channels", "channels": "d_model", "vocab_size": "classes", "classes": "vocab_size",
}
EXAMPLES = {"stage_layers": "3,2,2,1", "image_shape": "8,8,1", "data": "text.txt"}


def hint(word: str, names) -> str:
    """'; did you mean --seq-len?' for a misspelt flag or key, of the fields in `names`."""
    options = {name.replace("_", "-"): flag(name) for name in names}
    options |= {other.replace("_", "-"): flag(name) for other, name in SYNONYMS.items()
                if name in names and other not in names}
    return suggestion(word.lstrip("-").replace("_", "-"), options)
