"""Names that people type: other programs' names for settings, and example values."""

from mpipar.config.removed import REMOVED
from mpipar.config.setting import flag
from mpipar.errors import suggestion

SYNONYMS = {  # other programs' names -> field
    "learning_rate": "lr",
    "num_layers": "layers",
    "n_layer": "layers",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "num_heads": "heads",
    "n_head": "heads",
    "block_size": "seq_len",
    "max_steps": "steps",
    "output_dir": "out",
}
OTHERWISE = {  # other programs' names for what works differently here -> what to type
    "epochs": "--steps: a run has a number of steps, and reads its data as often as they need",
    "gpu": "--device cuda",
    "gpus": "mpiexec -n GPUS before mpipar (--ranks with explain and plan), and --device cuda",
    "micro_batch_size": "--num-microbatches: a microbatch has batch-size / (dp *"
    " num-microbatches) rows",
    "gradient_accumulation_steps": "--num-microbatches, with the same number: --batch-size is the"
    " batch of the whole step",
    "dropout": "nothing: leave it out",
}
EXAMPLES = {
    "stage_layers": "3,2,2,1",
    "data": "text.txt",
    "val_data": "held-out.txt",
    "rope_scaling": "8,1,4,8192",
    "stop_token": "50256",
    "experts": "8",
    "islands": "2",
}


def unknown_word(word: str, names, what: str) -> str:
    """Return the message for a word that is no flag or key (`what`) of the fields in `names`."""
    name = word.lstrip("-").replace("-", "_")
    if (instead := REMOVED.get(flag(name))) is not None:
        return f"is gone; {instead}"
    if SYNONYMS.get(name) in names:
        return f"is called {flag(SYNONYMS[name])} here; type that"
    if name in OTHERWISE:
        return f"unknown {what}; type {OTHERWISE[name]}"
    options = {one.replace("_", "-"): flag(one) for one in names}
    options |= {
        other.replace("_", "-"): flag(one) for other, one in SYNONYMS.items() if one in names
    }
    return f"unknown {what}{suggestion(word.lstrip('-').replace('_', '-'), options)}"
