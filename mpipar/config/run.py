"""Input, output, device and diagnostics of a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from mpipar.config.presets import PRESETS
from mpipar.config.setting import setting

RUNS = Path("runs")  # parent of run folders that --out does not name
ALL_REDUCES = ("mpi", "ring", "doubling", "halves", "window")  # of --all-reduce
# How the text at the end begins, and the temperature of its draws; `generate` takes others.
PROMPT, TEMPERATURE = "The ", 0.5
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
        only=("dtype", "float16"),
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
        only=("device", "cuda"),
    )
    seed: int = setting(
        0, "determines weights and order of rows, for every layout", low=0, below=2**63
    )
    init_from: str | None = setting(
        None,
        "initial weights, which fix the model's shape: a run, a folder of weights, or a checkpoint",
    )
    resume: str = setting(
        NEVER,
        "resume from a checkpoint: never, auto (the newest of --out),"
        " or the folder of a run or of a step",
        metavar="{never,auto,FOLDER}",
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
    tensorboard: bool = setting(
        False, "write event files for TensorBoard into the run folder (extra: tensorboard)"
    )
    all_reduce: str = setting(
        "mpi",
        "all-reduce algorithm: mpi = the library's own; mpipar net --via algorithms shows which is"
        " fastest",
        choices=ALL_REDUCES,
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
        None,
        "write a full record of the steps FIRST:LAST to the run folder, for mpipar trace; none ="
        " no record (default: 10:12 without the operations of layers, in a run that takes them)",
        metavar="FIRST:LAST|none",
    )
    memory_limit: int | None = setting(
        None,
        "limit on the bytes of a rank's arrays; the error for exceeding it names the array"
        " (default: no limit)",
        low=1,
        below=2**63,
        in_bytes=True,
    )
    sample_tokens: int = setting(200, "tokens generated at the end; 0 = none", low=0, high=2**20)


def named_folder(run: RunConfig) -> Path | None:
    """Return the folder that the user named, or None for the next number in runs/."""
    return Path(run.out) if run.out is not None else None


def trace_steps(text: str | None) -> tuple[int, int] | None:
    """Return (first, last) of --trace FIRST:LAST or --trace STEP; None for any other text."""
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text or "")
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (first, last) if 1 <= first <= last else None


def traced_steps(text: str | None, first: int, last: int) -> tuple[int, int] | None:
    """Return the steps of --trace that a run of the steps `first` to `last` records, or None.

    Without the flag they are 10 to 12, by which times are steady.
    """
    chosen = (10, 12) if text is None else trace_steps(text)
    return chosen if chosen and first <= chosen[0] and chosen[1] <= last else None
