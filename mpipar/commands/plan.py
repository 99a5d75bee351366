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
        choices=("bfloat16", "float16", "float32"),
    )
    stack: str = setting("mpipar", "software whose efficiency is assumed", choices=tuple(STACKS))
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


def question_of(args: Arguments, job: Job) -> Question:
    """Return what the flags ask about a model. Raises UsageError and DataError."""
    model, machine, stack = job.config.model, load_machine(args.machine, args.ranks), args.stack
    given = {
        name: value
        for name in ("layout", "schedule", "recompute", "zero")
        if (value := getattr(args, name)) is not None
    }
    wrong: list[str] = []
    fixed = expand_layout(given, wrong, LAYOUT)
    axes = {name: max(1, fixed.get(name, 1)) for name in LAYOUT}
    product, zero = math.prod(axes[name] for name in AXES), fixed.get("zero", 0)
    dtype, tokens = args.dtype or machine.dtype, args.seq_len or model.seq_len
    batch = (
        args.batch_size
        or job.config.train.batch_size
        or PRESETS[job.config.run.preset]["batch_size"]
    )
    wrong += broken(
        *((fixed.get(name) == 0, f"--layout {name}=0: must be at least 1") for name in LAYOUT),
        *(
            (
                axes[name] > 1 and name not in STACKS[stack].axes,
                (
                    f"--layout {name}={axes[name]}: --stack {stack} cuts a job along"
                    f" {', '.join(STACKS[stack].axes)} only"
                ),
            )
            for name in LAYOUT
        ),
        (
            fixed.get("pp") == 1 and "schedule" in fixed,
            f"--schedule {args.schedule}: orders the passes of several stages, but pp is 1",
        ),
        (
            args.ranks % product,
            f"--ranks {args.ranks}: is not a multiple of {product}, the layout's",
        ),
        (
            zero not in STACKS[stack].zeros,
            (
                f"--zero {zero}: --stack {stack} has"
                f" {' and '.join(map(str, STACKS[stack].zeros))} only"
            ),
        ),
        (
            job.flags.startswith("--init-from") and tokens > model.completed().longest_row,
            f"--seq-len {tokens}: is longer than the sequences that the weights are made for",
        ),
        (
            dtype not in machine.peak_tflops,
            f"--dtype {dtype}: {machine.name} has no rate for it",
        ),
        (
            axes["ep"] > 1 and not model.experts,
            f"--layout ep={axes['ep']}: MODEL {brief(args.model)} has no experts; leave ep out",
        ),
        (
            model.experts and model.experts % axes["ep"],
            f"--layout ep={axes['ep']}: does not divide the {model.experts} experts",
        ),
        (batch % axes["dp"], f"--batch-size {batch}: is not a multiple of dp={axes['dp']}"),
    )
    if wrong:
        raise UsageError(wrong)
    gib = args.memory_limit / GIB if args.memory_limit else machine.memory_gib
    return with_own_step(
        Question(
            Shape.of(replace(model, seq_len=tokens)),
            machine.with_dtype(dtype),
            args.ranks,
            gib * (1 - FREE / 100),
            STACKS[stack].with_dtype(dtype),
            batch,
            fixed,
            dtype,
        ),
        job.config,
    )


def job_of(args: Arguments) -> Job:
    """Return the Job of a preset, a TOML file or a folder. Raises UserError."""
    text, quoted = args.model, shlex.quote(args.model)
    if text in PRESETS:
        config, flags = build({"preset": text}), f"--preset {quoted}"
    elif text.endswith(".toml"):
        parsed = read({"config": text})
        if wrong := [*parsed.problems, *config_problems(parsed.config)]:
            raise UsageError(wrong)
        config, flags = parsed.config, f"--config {quoted}"
    elif os.path.isdir(text):
        config = build(model_settings(text, where=f"MODEL {brief(text)}"))
        flags = f"--init-from {quoted}"
    else:
        raise UsageError(
            f"MODEL {brief(text)}: is not a preset{suggestion(text, list(PRESETS))}; use one of"
            f" {', '.join(PRESETS)}, a file that ends in .toml, or a folder with config.json"
        )
    if wrong := config_problems(config):
        raise DataError([f"MODEL {brief(text)}: {one}" for one in wrong])
    return Job(config, flags)


COMMAND = Command(run, "MODEL --machine NAME --ranks N [flags]", Arguments)
