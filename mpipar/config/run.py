"""Input, output, device and diagnostics of a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from mpipar.config.presets import PRESETS
from mpipar.config.setting import setting

OF_GPU = ("device", "cuda")
OF_FLOAT16 = ("dtype", "float16")
RUNS = Path("runs")  # parent of run folders that --out does not name
SUMS = ("mpi", "ring", "doubling", "halves", "levels", "window")  # of --all-reduce
NEVER, AUTO = "never", "auto"  # of --resume


@dataclass(frozen=True)
class RunConfig:
    """Input, output, device and diagnostics."""

    preset: str = setting("tiny", "start from these values", choices=tuple(PRESETS))
    data: tuple[str, ...] = setting(
        (), "text or token files, folders, or a prepared folder (default: Python's docs)"
    )
    val_data: tuple[str, ...] = setting(
        (),
        "held-out data, in the forms of --data, which is then used for training as a whole"
        " (default: the last tenth of --data, or what a prepared folder holds out)",
    )
    out: str | None = setting(
        None, "run folder; must be new (default: runs/NUMBER, the next free number)"
    )
    run_name: str | None = setting(None, "name of the run folder in runs/, instead of --out")
    device: str = setting("cpu", "device that holds the arrays", choices=("cpu", "cuda"))
    dtype: str = setting(
        "float32",
        "type of weights and activations; sums are float32 or wider",
        choices=("float32", "float64", "bfloat16", "float16"),
    )
    loss_scale: float | None = setting(
        None,
        "float16: initial loss scale (default 65536)",
        above=0,
        below=2.0**127,
        only=OF_FLOAT16,
    )
    loss_scale_interval: int | None = setting(
        None,
        "float16: finite steps until the loss scale doubles (default 2000)",
        low=1,
        only=OF_FLOAT16,
    )
    kernels: str | None = setting(
        None,
        "kernels between the matrix products (default: numpy; GPU: fused)",
        choices=("numpy", "numba", "fused", "plain"),
    )
    gemm: str = setting(
        "blas",
        "GPU: library or kernel for matrix products",
        choices=("blas", "tile"),
        only=OF_GPU,
    )
    tf32: bool = setting(
        False, "GPU: cuBLAS multiplies float32 with a 10-bit mantissa", only=OF_GPU
    )
    seed: int = setting(
        0, "determines weights and order of rows, for every layout", low=0, below=2**63
    )
    init_from: str | None = setting(
        None,
        "initial weights, which fix the model's shape: a run, a folder of weights, or a checkpoint",
    )
    max_shard_size: int = setting(
        5 << 30,
        "largest size of a weight file; larger weights are split into several files with"
        " an index (default 5G)",
        low=1,
        below=2**63,
        in_bytes=True,
    )
    resume: str = setting(
        NEVER,
        "resume from a checkpoint: never, auto (the newest of --out),"
        " or the folder of a run or of a step",
    )
    save_interval: int = setting(
        0, "steps between checkpoints; 0 = only at the end and when stopped", low=0
    )
    save_async: bool = setting(False, "write checkpoints while the next steps run")
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep; 0 = all", low=0)
    log_interval: int = setting(20, "steps per line on the console", low=1)
    eval_interval: int = setting(
        0, "steps between evaluations of the held-out loss; 0 = only after the last step", low=0
    )
    eval_tokens: int | None = setting(
        None,
        "held-out tokens per evaluation, from the start of the data, in whole rows (default: all)",
        low=1,
        below=2**63,
    )
    progress: str | None = setting(
        None,
        "console output between steps: plain = a line every --log-interval; line = one line"
        " that is updated in place (default: line on a terminal)",
        choices=("plain", "line"),
    )
    tensorboard: bool = setting(
        False, "write event files for TensorBoard into the run folder (extra: tensorboard)"
    )
    sync_sends: bool = setting(False, "synchronous sends: expose code that relies on buffering")
    all_reduce: str = setting(
        "mpi",
        "all-reduce algorithm: mpi = the library's own; python -m bench.interconnect --ways"
        " algorithms shows which is fastest",
        choices=SUMS,
    )
    check_comm: bool = setting(
        False, "before each collective, check that all ranks of the group make the same call"
    )
    check_replicas: int = setting(
        100, "steps between comparisons of all replicas of weights and moments; 0 = never", low=0
    )
    hang_warn: float = setting(
        60.0, "seconds without progress until a report says who waits for whom; 0 = never", low=0.0
    )
    hang_stop: float = setting(
        600.0, "seconds without progress until the job ends with exit code 76; 0 = never", low=0.0
    )
    trace: str | None = setting(
        None, "write a full record of the steps FIRST:LAST to the run folder, for mpipar trace"
    )
    trace_ops: bool = setting(False, "with --trace, also time each operation of each layer")
    memory_limit: int | None = setting(
        None,
        "limit on the bytes of a rank's arrays; the error for exceeding it names the array"
        " (default: no limit)",
        low=1,
        below=2**63,
        in_bytes=True,
    )
    memory: bool = setting(False, "print the predicted bytes per rank before allocating them")
    prompt: str = setting("The ", "start of the text generated at the end (default 'The ')")
    sample_tokens: int = setting(200, "tokens generated at the end; 0 = none", low=0, high=2**20)
    sample_interval: int = setting(0, "steps between generated texts; 0 = only at the end", low=0)
    temperature: float = setting(
        0.8,
        "sampling temperature: higher = more random; 0 = always the most likely token",
        low=0.0,
    )
    top_k: int = setting(50, "draw each token from the N most likely ones", low=1, high=2**20)
    top_p: float = setting(
        1.0,
        "and of these only from the first ones whose probabilities add up to X",
        above=0.0,
        high=1.0,
    )
    stop_token: tuple[int, ...] = setting(
        (), "ids that end a text (default: the tokenizer's end of text)", low=0
    )


def named_folder(run: RunConfig) -> Path | None:
    """Return the folder that the user named, or None for the next number in runs/."""
    if run.out is not None:
        return Path(run.out)
    return RUNS / run.run_name if run.run_name is not None else None


def trace_steps(text: str | None) -> tuple[int, int] | None:
    """Return (first, last) of --trace FIRST:LAST or --trace STEP; None for any other text."""
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text or "")
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (first, last) if 1 <= first <= last else None
