"""`mpipar plan MODEL --machine NAME --ranks N`: which layout, why, and how certain; no MPI."""

import json
import math
import os
import shlex
from dataclasses import MISSING, dataclass, replace

from mpipar.comm.grid import AXES, LAYOUT
from mpipar.commands.command import Command, Context
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import config_problems
from mpipar.config.sections import FIELDS, build
from mpipar.config.setting import positional, setting, switch
from mpipar.config.text import brief
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_OK,
    DataError,
    UsageError,
    UserError,
    broken,
    suggestion,
)
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.files.settings import expand_layout, read
from mpipar.study.plan.job import STACKS, Shape
from mpipar.study.plan.machine import load_machine, machine_names
from mpipar.study.plan.memory import GIB
from mpipar.study.plan.report import Job, as_dict, report
from mpipar.study.plan.search import SCHEDULES, Question, search, with_own_step

FORMATS = ("bfloat16", "float16", "float32")
FREE = 5  # percent of a device's memory that is left free
MOST_RANKS, MOST_ROWS = 1 << 17, 1 << 24


@dataclass(frozen=True)
class Arguments:
    """The model, the machine, fixed parts of the layout, and what is printed."""

    model: str = positional(
        "MODEL", "a preset, a TOML file of mpipar train, or a folder with a config.json"
    )
    machine: str = setting(
        MISSING,
        f"{', '.join(machine_names())}, or a TOML file of the same form, as bench.calibrate writes",
        metavar="NAME|FILE",
    )
    ranks: int = setting(MISSING, "devices of the job", low=1, high=MOST_RANKS)
    batch_size: int | None = setting(
        None, "sequences per step (default: the preset's)", low=1, high=MOST_ROWS, metavar="ROWS"
    )
    seq_len: int | None = setting(
        None, "tokens per sequence (default: the model's)", low=1, high=1 << 24, metavar="T"
    )
    dtype: str | None = setting(
        None,
        "number format (default: the machine's 16-bit format; float32 on processors)",
        choices=FORMATS,
    )
    stack: str = setting("mpipar", "software whose efficiency is assumed", choices=tuple(STACKS))
    optimizer: str | None = setting(
        None,
        "update rule, for what it keeps in memory (default: the model's)",
        choices=FIELDS["optimizer"].metadata["choices"],
    )
    memory_limit: int | None = setting(
        None,
        "memory of a device, as 40G (default: the machine's); 5 % of it stays free",
        in_bytes=True,
        low=1,
        below=2**63,
        metavar="BYTES",
    )
    layout: str | None = setting(None, "fix these axes", metavar="dp=8,tp=8")
    schedule: str | None = setting(None, "fix the schedule", choices=tuple(SCHEDULES))
    recompute: str | None = setting(
        None, "fix activation recomputation", choices=FIELDS["recompute"].metadata["choices"]
    )
    zero: int | None = setting(
        None, "fix the ZeRO stage", choices=FIELDS["zero"].metadata["choices"]
    )
    top: int = setting(
        6, "number of layouts to print, with the reason why not first", low=1, high=100, metavar="K"
    )
    json: bool = switch("print everything as JSON and nothing else")


def run(context: Context) -> int:
    """Print the plan; return 0 if a layout fits, else 1.

    Raises UsageError for what is wrong for this model, DataError for files that cannot be read.
    """
    args = context.args
    job = job_of(args)
    question = question_of(args, job)
    plan = search(question, args.top)
    print(
        json.dumps(as_dict(question, plan, job), indent=1)
        if args.json
        else report(question, plan, job)
    )
    return EXIT_OK if plan.best else EXIT_CHECK_FAILED


def problems(args: Arguments) -> list[UserError]:
    """Return what is wrong between the arguments, or with the model and machine they name."""
    found, errors = [], []
    fixed = fixed_parts(args, found)
    axes = {name: fixed.get(name, 1) for name in LAYOUT}
    product = math.prod(axes[name] for name in AXES)
    found += [f"--layout {name}={n}: must be at least 1" for name, n in axes.items() if n < 1]
    if fixed.get("pp") == 1 and "schedule" in fixed:
        found.append(
            f"--schedule {fixed['schedule']}: orders the passes of several stages, but pp is 1;"
            " give one of them"
        )
    if not found and args.ranks % product:
        found.append(
            f"--ranks {args.ranks}: is not a multiple of {product}, the ranks of the given"
            f" axes; use {-(-args.ranks // product) * product}, or leave an axis out"
        )
    try:
        question_of(args, job_of(args))
    except UserError as error:
        errors.append(error)
    return [UsageError(found), *errors] if found else errors


def fixed_parts(args: Arguments, found: list[str]) -> dict:
    """Return the fixed parts of the layout; problems of --layout are added to `found`."""
    names = ("layout", "schedule", "recompute", "zero")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return expand_layout(given, found, LAYOUT)


def question_of(args: Arguments, job: Job) -> Question:
    """Return what the flags ask about a model. Raises UsageError and DataError."""
    model, fixed = job.config.model, fixed_parts(args, [])
    machine, stack = load_machine(args.machine, args.ranks), STACKS[args.stack]
    dtype = args.dtype or machine.dtype
    preset = PRESETS[job.config.run.preset]["batch_size"]
    batch = args.batch_size or job.config.train.batch_size or preset
    dp, ep = max(1, fixed.get("dp", 1)), max(1, fixed.get("ep", 1))
    longest, tokens = model.completed().longest_row, args.seq_len or model.seq_len
    near = [one for one in (batch // dp * dp, -(-batch // dp) * dp) if one]
    known = ", ".join(one for one in FORMATS if one in machine.peak_tflops)
    remaining_group = [one for one in LAYOUT if fixed.get(one, 1) > 1 and one not in stack.axes]
    wrong = broken(
        (
            remaining_group,
            (
                f"--layout {','.join(f'{one}={fixed[one]}' for one in remaining_group)}: --stack"
                f" {args.stack} cuts a job along {', '.join(stack.axes)} only; leave it out"
            ),
        ),
        (
            args.optimizer and not stack.own,
            f"--optimizer: --stack {args.stack} is counted with AdamW; leave one of them out",
        ),
        (
            fixed.get("zero", 0) not in stack.zeros,
            (
                f"--zero {fixed.get('zero')}: --stack {args.stack} has"
                f" {' and '.join(map(str, stack.zeros))} only"
            ),
        ),
        (
            job.flags.startswith("--init-from") and tokens > longest,
            (
                f"--seq-len {tokens}: the weights are made for sequences of at most {longest}"
                " tokens; use that, or leave it out"
            ),
        ),
        (
            dtype not in machine.peak_tflops,
            f"--dtype {dtype}: {machine.name} has no rate for it; use one of {known}",
        ),
        (
            ep > 1 and not model.experts,
            f"--layout ep={ep}: MODEL {brief(args.model)} has no experts; leave ep out",
        ),
        (
            model.experts and model.experts % ep,
            f"--layout ep={ep}: does not divide the {model.experts} experts",
        ),
        (
            batch % dp,
            (
                f"--batch-size {batch}: is not a multiple of dp={dp}; use"
                f" {' or '.join(map(str, near))}"
            ),
        ),
    )
    if wrong:
        raise UsageError(wrong)
    gib = args.memory_limit / GIB if args.memory_limit else machine.memory_gib
    question = Question(
        Shape.of(replace(model, seq_len=tokens).completed()),
        machine.with_dtype(dtype),
        args.ranks,
        gib * (1 - FREE / 100),
        stack.with_dtype(dtype),
        batch,
        fixed,
        dtype,
    )
    return with_own_step(question, job.config)


def job_of(args: Arguments) -> Job:
    """Return the Job of a preset, a TOML file or a folder. Raises UserError."""
    text, quoted = args.model, shlex.quote(args.model)
    if text in PRESETS:
        config, flags = build({"preset": text}), f"--preset {quoted}"
    elif text.endswith(".toml"):
        parsed = read({"config": text})
        if parsed.problems:
            raise UsageError([*parsed.problems, *config_problems(parsed.config)])
        config, flags = parsed.config, f"--config {quoted}"
    elif os.path.isdir(text) or os.path.basename(text) == "config.json":
        folder = text if os.path.isdir(text) else os.path.dirname(text) or "."
        config = build(model_settings(folder, where=f"MODEL {brief(text)}"))
        flags = f"--init-from {shlex.quote(folder)}"
    else:
        close = suggestion(text, list(PRESETS))
        raise UsageError(
            f"MODEL {brief(text)}: is not a preset{close}; use one of"
            f" {', '.join(PRESETS)}, a file that ends in .toml, or a folder with"
            " config.json"
        )
    if wrong := config_problems(config):
        raise DataError([f"MODEL {brief(text)}: {one}" for one in wrong])
    if args.optimizer:
        config = replace(config, train=replace(config.train, optimizer=args.optimizer))
        flags += f" --optimizer {args.optimizer}"
    return Job(config, flags)


COMMAND = Command(run, "MODEL --machine NAME --ranks N [flags]", Arguments, problems=problems)
