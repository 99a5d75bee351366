"""The configuration as plain data: what can be set, in which unit, why, and which values are legal.

The fields below are the only source: command-line flags, TOML keys and `config.toml` are generated
from them (flags.py). One flat key space: field `seq_len` = flag `--seq-len` = TOML key `seq-len`.
`None` means "chosen by resolve()", which turns a Config and a number of ranks into a complete one.

The defaults are the preset `tiny`; PRESETS holds what the other presets change.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mpipar.config import layout, presets
from mpipar.config.layout import divisors, listing
from mpipar.config.presets import PRESETS
from mpipar.errors import UsageError, UserError, combine, suggestion

AXES = ("pp", "dp", "cp", "tp")
Check = tuple[Callable[["Config"], list[str]], type[UserError]]


def setting(default, text, *, low=None, above=None, below=None, choices=None, in_bytes=False):
    """A field: help, low <= value, above < value, value < below; in_bytes: 64K is a value too."""
    legal = {"low": low, "above": above, "below": below, "choices": choices, "in_bytes": in_bytes}
    return dataclasses.field(default=default, metadata={"help": text, **legal})


@dataclass(frozen=True)
class ModelConfig:
    """A decoder (GPT-2 family, pre-norm, learned positions), or a network of convolutions."""

    model: str = setting("decoder", "decoder of text, or convnet: its D are channels, V classes",
                         choices=("decoder", "convnet"))
    layers: int = setting(4, "blocks: of a transformer, or pairs of convolutions", low=1)
    d_model: int = setting(128, "model width D, in features", low=1)
    heads: int = setting(4, "attention heads H; head width = D/H; tp divides H", low=1)
    ffn: int | None = setting(None, "FFN width F, in features (default 4*D); padded for tp", low=1)
    seq_len: int = setting(64, "tokens per row T; attention memory grows with T^2", low=1)
    vocab_size: int = setting(256, "tokens in the vocabulary V (256 = bytes); padded for tp", low=2)
    tied: bool = setting(True, "the head uses the token embedding's weights (one matrix less)")
    norm: str = setting("layer", "layer = LayerNorm; rms = RMSNorm, which has no mean and no bias",
                        choices=("layer", "rms"))
    ffn_cut: str = setting(
        "pair", "FFN over tp: pair = column + row, one all-reduce; gather = both by output, an "
        "all-gather after each; reduce = both by input, an all-reduce after each",
        choices=("pair", "gather", "reduce"))
    sequence_parallel: bool = setting(
        False, "cut tokens over tp between the products: norms, residuals, stash and messages / tp")
    tp_matmul: str = setting(
        "plain", "ring: with --sequence-parallel, tokens travel in pieces while others are "
        "multiplied", choices=("plain", "ring"))
    image_shape: tuple[int, ...] = setting(
        (8, 8, 1), "convnet: height, width and channels of an image", low=1)
    stem_stride: int = setting(
        1, "convnet: step of the first convolution; 2 = a quarter of the work", low=1)


@dataclass(frozen=True)
class GridConfig:
    """The ranks: dp x pp x cp x tp = number of ranks, and the order of work in the pipeline."""

    dp: int | None = setting(None, "data-parallel copies (default: what the ranks leave)", low=1)
    pp: int | None = setting(None, "pipeline ranks (default 2 if the ranks allow)", low=1)
    cp: int = setting(1, "context-parallel ranks; only 1 is built", low=1)
    tp: int | None = setting(None, "tensor-parallel ranks (default 2 from 4 ranks on)", low=1)
    rank_order: str = setting(
        "pp,dp,cp,tp", "axes from outermost to innermost; neighbours of the last are nearest")
    schedule: str = setting(
        "1f1b", "order of forward and backward in the pipeline, or auto: the shortest simulated "
        "step, from costs measured at the start")
    schedule_csv: str | None = setting(
        None, "run the schedule of this CSV file (torch.distributed.pipelining's format)")
    chunks: int | None = setting(None, "stages per pipeline rank (default: the schedule's)", low=1)
    group_size: int | None = setting(
        None, "interleaved: microbatches that go round the ranks together (default: pp)", low=1)
    stage_layers: tuple[int, ...] | None = setting(
        None, "blocks of each stage, as 3,2,2,1 (default: equal cost, head counted)", low=0)
    num_microbatches: int | None = setting(
        None, "microbatches per step and dp copy; more = smaller pipeline bubble", low=1)


@dataclass(frozen=True)
class TrainConfig:
    """The update."""

    steps: int = setting(300, "optimizer updates", low=1)
    batch_size: int | None = setting(
        None, "rows per step over all ranks; a multiple of dp * num-microbatches", low=1)
    optimizer: str = setting("adamw", "update rule", choices=("adamw", "sgd"))
    lr: float = setting(3e-3, "peak learning rate", above=0.0)
    min_lr_ratio: float = setting(0.1, "last learning rate / peak, end of the cosine", low=0.0)
    warmup_steps: int = setting(20, "steps of linear warm-up, for Adam's first steps", low=0)
    weight_decay: float = setting(0.1, "decoupled, per unit of lr; matrices only", low=0.0)
    beta1: float = setting(0.9, "AdamW: decay of the gradient's mean", low=0.0, below=1.0)
    beta2: float = setting(0.95, "AdamW: decay of its square's mean", low=0.0, below=1.0)
    eps: float = setting(  # 0 in float32 would make NaN of weights that never had a gradient
        1e-8, "AdamW: added to the root of the square's mean", low=2.0**-126)
    clip: float = setting(1.0, "largest global gradient norm; 0 = no clipping", low=0.0)
    bucket_bytes: int = setting(
        4 * 2**20, "bytes per gradient all-reduce; smaller = earlier start, more messages", low=1,
        in_bytes=True)


@dataclass(frozen=True)
class RunConfig:
    """Input, output and the machine."""

    preset: str = setting("tiny", "start from these values", choices=tuple(PRESETS))
    data: tuple[str, ...] = setting((), "text or token files or folders (default: Python's docs)")
    out: str | None = setting(None, "run folder; must be new (default: runs/NUMBER, the next one)")
    run_name: str | None = setting(None, "name of the run folder in runs/, in place of --out")
    device: str = setting("cpu", "where arrays live", choices=("cpu", "cuda"))
    dtype: str = setting("float32", "of weights and activations; with 16 bits sums stay float32",
                         choices=("float32", "float64", "bfloat16", "float16"))
    loss_scale: float | None = setting(None, "float16: at first (65536)", above=0, below=2.0**127)
    loss_scale_interval: int | None = setting(
        None, "float16: good steps until the factor doubles (default 2000)", low=1)
    kernels: str | None = setting(None, "between products (default: numpy; on a GPU: fused)",
                                  choices=("numpy", "numba", "fused", "plain"))
    gemm: str = setting("blas", "GPU: who multiplies", choices=("blas", "tile", "cuda-tile"))
    tf32: bool = setting(False, "GPU: cuBLAS multiplies float32 with 10 bits of mantissa")
    seed: int = setting(0, "fixes weights and order of rows, for every layout", low=0, below=2**63)
    init_from: str | None = setting(None, "folder with weights to start from; fixes the shape")
    save_interval: int = setting(0, "steps between two writes of weights; 0 = at the end", low=0)
    log_interval: int = setting(20, "steps per line on the console", low=1)
    sync_sends: bool = setting(False, "synchronous sends: finds code that relies on buffering")
    check_comm: bool = setting(
        False, "before each collective, check that all ranks of the group make the same call")
    hang_warn: float = setting(
        60.0, "seconds without progress until it is reported who waits for whom; 0 = never",
        low=0.0)
    hang_stop: float = setting(
        600.0, "seconds without progress until the job ends with exit code 76; 0 = never", low=0.0)
    trace: str | None = setting(
        None, "write every record of the steps FIRST:LAST to the run folder, for mpipar trace")
    trace_ops: bool = setting(False, "with --trace, also time each operation of each layer")
    memory_limit: int | None = setting(
        None, "bytes of a rank's arrays: more is an error that names the layouts that fit, and"
        " --schedule auto plans with it (default: no limit)", low=1, below=2**63, in_bytes=True)
    memory: bool = setting(False, "print the predicted bytes per rank before allocating them")
    prompt: str = setting("The ", "start of the text generated at the end")
    sample_tokens: int = setting(200, "tokens generated at the end; 0 = none", low=0)
    temperature: float = setting(0.8, "of that text; 0 = always the likeliest token", low=0.0)


@dataclass(frozen=True)
class Config:
    """Everything a command needs to know."""

    model: ModelConfig = ModelConfig()
    grid: GridConfig = GridConfig()
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()


def flag(field_name: str) -> str:
    """The flag of a field: seq_len -> --seq-len."""
    return "--" + field_name.replace("_", "-")


def settings(config: Config) -> Iterable[tuple[str, dataclasses.Field, object]]:
    """Every (section name, field, value) of a Config, in the order they are written."""
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            yield section.name, field, getattr(part, field.name)


def _one_value(name: str, legal: dict, value) -> str | None:
    """What is wrong with one number or string, or None."""
    shown = f"{flag(name)} {value}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown}: must be a finite number"
    if legal["low"] is not None and value < legal["low"]:
        return f"{shown}: must be at least {legal['low']}"
    if legal["above"] is not None and value <= legal["above"]:
        return f"{shown}: must be greater than {legal['above']:g}"
    below = legal["below"] or (2**31 if isinstance(value, int) else math.inf)
    if isinstance(value, int | float) and value >= below:
        return f"{shown}: must be less than {below}"
    if legal["choices"] and value not in legal["choices"]:
        hint = suggestion(value, legal["choices"])
        return f"{flag(name)} {value!r}: must be one of {', '.join(legal['choices'])}{hint}"
    if isinstance(value, str) and any(0xD800 <= ord(letter) < 0xE000 for letter in value):
        return f"{flag(name)} {value!r}: is not valid UTF-8, so it cannot be written to config.toml"
    return None


def _value_problems(config: Config) -> dict[str, str]:
    """Field name -> what is wrong with its value, each field on its own."""
    found = {}
    for _, field, value in settings(config):
        if value is None or isinstance(value, bool):
            continue
        for one in value if isinstance(value, tuple) else (value,):
            problem = _one_value(field.name, field.metadata, one)
            if problem:
                found[field.name] = problem
    if config.grid.cp > 1:
        found["cp"] = f"--cp {config.grid.cp}: context parallelism is not built yet; use --cp 1"
    return found


def _relation_problems(config: Config, bad: set[str]) -> list[str]:
    """What is wrong between fields; a relation with a field in `bad` is not judged."""
    model, grid, run = config.model, config.grid, config.run
    found = []
    if not bad & {"d_model", "heads"} and model.d_model % model.heads:
        found.append(f"--heads {model.heads}: must divide --d-model {model.d_model}; "
                     f"use {listing(divisors(model.d_model), model.heads)}")
    if sorted(grid.rank_order.split(",")) != sorted(AXES):
        found.append(f"--rank-order {grid.rank_order}: must name each of {', '.join(AXES)} once, "
                     f"as in --rank-order {','.join(AXES)}")
    if model.tp_matmul == "ring" and not model.sequence_parallel:
        found.append("--tp-matmul ring: cuts the barriers of --sequence-parallel in pieces; add "
                     "--sequence-parallel, or leave it out")
    if model.ffn_cut != "pair" and model.sequence_parallel and "ffn_cut" not in bad:
        found.append(f"--ffn-cut {model.ffn_cut}: keeps all tokens on every rank, which "
                     "--sequence-parallel does not; give one of them")
    if not bad & {"preset", "model", "image_shape", "stem_stride"}:
        found += presets.problems(run.preset, model.model) + layout.image_problems(model)
    total = sum(grid.stage_layers or (model.layers,))
    if not bad & {"stage_layers", "layers"} and total != model.layers:
        found.append(f"--stage-layers {','.join(map(str, grid.stage_layers))}: the sum is "
                     f"{total}, but --layers is {model.layers}")
    if run.run_name is not None and (run.run_name in ("", ".", "..") or "/" in run.run_name):
        found.append(f"--run-name {run.run_name!r}: must be a plain name; it goes into runs/, "
                     "and --out takes any other folder")
    if run.run_name is not None and run.out is not None:
        found.append(f"--run-name {run.run_name} and --out {run.out}: give one of them")
    return found


def problems(config: Config) -> list[str]:
    """Everything wrong with the values themselves, whatever the number of ranks."""
    found = _value_problems(config)
    return [*found.values(), *_relation_problems(config, set(found))]


def _choose_batch(config: Config) -> tuple[Config, list[str], list[str]]:
    """The config with batch size and microbatches filled in, problems, notes."""
    preset, dp, rows = PRESETS[config.run.preset], config.grid.dp, config.train.batch_size
    num_mb = config.grid.num_microbatches or preset["num_microbatches"]
    unit, found, notes = dp * num_mb, [], []
    up = -(-(rows or preset["batch_size"]) // unit) * unit
    if rows is None and up != preset["batch_size"]:
        notes.append(f"batch size {preset['batch_size']} of preset {config.run.preset} rounded up "
                     f"to {up}, a multiple of dp {dp} * {num_mb} microbatches")
    elif rows is not None and up != rows:
        down = f"{up - unit} or " if up > unit else ""
        cure = (f", or --num-microbatches {listing(divisors(rows // dp), num_mb)}"
                if rows % dp == 0 else "")
        found.append(f"--batch-size {rows}: must be a multiple of dp {dp} * {num_mb} "
                     f"microbatches = {unit}; use --batch-size {down}{up}{cure}")
    return replace(config, grid=replace(config.grid, num_microbatches=num_mb),
                   train=replace(config.train, batch_size=up)), found, notes


# While one of these is wrong no other floor is asked: it could not compute with the value.
FIRST = {"batch_size", "preset", "dtype", "device", "loss_scale", "loss_scale_interval", *(
    field.name for part in (ModelConfig, GridConfig) for field in dataclasses.fields(part))}


def complete(config: Config, world_size: int, checks: Iterable[Check] = (),
             bad: Iterable[str] = ()) -> tuple[Config, list[str], list[UserError]]:
    """Fill in every None; return the config, notes for the user, and all problems as errors.

    `checks` are the other floors' problems(config), each with the error it stands for; they get the
    completed config. `bad` names fields whose text could not even be read: they hold defaults, so
    nothing is concluded from them.
    """
    found = _value_problems(config)
    bad = set(found) | set(bad)
    usage, notes, errors = [*found.values(), *_relation_problems(config, bad)], [], []
    if not bad & FIRST:
        model = replace(config.model, ffn=config.model.ffn or 4 * config.model.d_model)
        given = config.grid
        (dp, pp, tp), misfits = layout.choose(
            (given.dp, given.pp, given.tp), world_size, model.layers, layout.whole_heads(model),
            model.d_model, config.run.init_from is not None)
        config = replace(config, model=model, grid=replace(given, dp=dp, pp=pp, tp=tp))
        config, batch_problems, notes = _choose_batch(config)
        usage += misfits + (batch_problems if given.dp or not misfits else [])
        for check, error in checks:
            texts = check(config)
            errors += [error(texts)] if texts else []
    if usage:
        errors.insert(0, UsageError(usage))
    return config, notes, errors


def resolve(config: Config, world_size: int,
            checks: Iterable[Check] = ()) -> tuple[Config, list[str]]:
    """The complete Config for this number of ranks, and notes; all problems in one error."""
    config, notes, errors = complete(config, world_size, checks)
    if errors:
        raise combine(errors)
    return config, notes
