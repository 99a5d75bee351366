"""Names that people type and that are no settings: former ones, and other programs'.

For a former one it says what to type instead, and what a saved configuration may hold of it.
"""

from mpipar.config.setting import flag
from mpipar.errors import suggestion

_KEY = "write it as a key of --config FILE.toml, or take it from weights with --init-from"
_GENERATE = "mpipar generate takes it; training prints a text of its own (--sample-tokens)"
_DECODER = "leave it out; every model is a decoder (docs/examples/convolution.py cuts convolutions)"
REMOVED: dict[str, str] = {  # flag -> what to do instead
    "--model": _DECODER,
    "--channels": _DECODER,
    "--classes": _DECODER,
    "--image-shape": _DECODER,
    "--stem-stride": _DECODER,
    "--blas-arch": "set the environment variable OPENBLAS_CORETYPE",
    "--group-size": "leave it out: groups have as many microbatches as there are pipeline ranks",
    "--recompute-layers": "leave it out: all blocks of a stage are recomputed",
    "--zero-grads": "leave it out: --zero 3 shards the gradients too",
    "--loss-scale-interval": "leave it out: the loss scale doubles after 2000 finite steps",
    "--tf32": "use --dtype bfloat16",
    "--max-shard-size": "leave it out: weights are one file, model.safetensors",
    "--run-name": "use --out runs/NAME",
    "--progress": "leave it out: a terminal gets a status line; for plain lines, pipe through cat",
    "--memory": "use mpipar explain, which shows the predicted bytes by purpose",
    "--trace-ops": "leave it out: --trace times operations too",
    "--summary": "leave it out: mpipar explain prints the summary",
    "--take-over": "type the rm command of the refusal",
    "--goal": "use a simulator's own converter; python -m bench.rehearse plays a step",
    "--chakra": "use a simulator's own converter; python -m bench.rehearse plays a step",
    "--sites": "describe two sites as the last level of links in the data sheet",
    "--batch-range": "call mpipar plan with each --batch-size",
    "--confirm": "leave it out: the step is always run on shapes",
    "--sample-interval": "use --save-interval, and mpipar generate on each checkpoint",
    "--prompt": _GENERATE,
    "--temperature": _GENERATE,
    "--top-k": _GENERATE,
    "--top-p": _GENERATE,
    "--stop-token": _GENERATE,
    "--animate": "leave it out: the picture shows the whole step",
    "--csv-format": "leave it out: a file has the passes alone, from which messages follow",
    "--answers": "redirect the standard output: > answers.jsonl",
    "--decay-ratio": "leave it out: wsd decays in the last fifth of the steps",
    "--router-bias-rate": "leave it out: the bias of an expert changes by 0.001 per step",
    "--expert-dispatch": "leave it out: each row goes to the ranks of its token's experts",
    "--routing": "leave it out: the router decides",
    "--sync-sends": "set the environment variable MPIPAR_SYNC_SENDS=1",
    "--head-dim": _KEY,
    "--rope-scaling": _KEY,
    "--max-positions": _KEY,
    "--expert-interval": _KEY,
    "--router-loss-coef": _KEY,
}
CONSTANT: dict[str, object] = {  # a saved key -> its default; any other value is refused
    "model": "decoder",
    "tf32": False,
    "max_shard_size": 5 << 30,
    "memory": False,
    "sample_interval": 0,
    "prompt": "The ",
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 1.0,
    "stop_token": [],
    "decay_ratio": 0.2,
    "router_bias_rate": 0.001,
    "routing": "learned",
    "sync_sends": False,
    "loss_scale_interval": 2000,
    "group_size": None,  # a key that was written had another value
    "recompute_layers": None,
}
# Saved keys that are skipped whatever their value: none of them changes what is trained.
SKIPPED = ("blas_arch", "run_name", "progress", "trace_ops", "zero_grads")
# For one release: former name -> (name, former value -> value).
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "zero_keep": ("reshard_after_forward", {"none": "yes", "stage": "no"})
}


def gone(name: str, value: object) -> str | None:
    """Return a note on a saved key that is skipped; None for a key of today.

    Raises ValueError if it is gone and its value is not the one that it would have today.
    """
    key = name.replace("_", "-")
    if name in SKIPPED or (name in CONSTANT and value == CONSTANT[name]):
        return f"{key} is no longer a setting, and left out"
    if name in CONSTANT:
        raise ValueError(
            f"{key} = {value!r} is no longer possible ({REMOVED['--' + key]}); resume with the"
            " version that wrote it, or give its weights to a new run with --init-from"
        )
    return None


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
    "costs": "1,1/2,0.5",
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
    known = dict(zip(names, names, strict=True)) | SYNONYMS
    options = {other.replace("_", "-"): flag(one) for other, one in known.items() if one in names}
    return f"unknown {what}{suggestion(word.lstrip('-').replace('_', '-'), options)}"
