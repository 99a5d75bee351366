"""The question to `mpipar plan`: model, machine, batch, fixed parts of the layout; all checked."""

import os
import shlex
from dataclasses import MISSING, dataclass, replace

from mpipar.checkpoint.formats import model_settings
from mpipar.comm.grid import AXES, LAYOUT
from mpipar.config.layout import divisors
from mpipar.config.presets import PRESETS
from mpipar.config.reading import expand_layout, read
from mpipar.config.resolve import config_problems
from mpipar.config.sections import FIELDS, build
from mpipar.config.setting import positional, setting, switch
from mpipar.errors import DataError, UsageError, UserError, suggestion
from mpipar.files.text import brief
from mpipar.plan.cluster import STACKS, Cluster, load_cluster, machine_names
from mpipar.plan.confirm import Job
from mpipar.plan.footprint import GIB
from mpipar.plan.formats import FORMATS
from mpipar.plan.search import FIXED, SCHEDULES, Kind, Question
from mpipar.plan.shape import MFU_RULES, Shape
from mpipar.plan.sites import Sites

GRADIENTS = {"float32": 4, "bfloat16": 2, "float16": 2}  # format: bytes of a number
MOST_RANKS = 1 << 17
MOST_ROWS = 1 << 24  # per step
ACTIVATIONS = ("gelu", "swiglu", "relu2")


@dataclass(frozen=True)
class Arguments:
    """The model, the machine, fixed parts of the layout, and what is printed."""

    model: str = positional(
        "MODEL",
        "a preset, a TOML file of mpipar train, or a folder with Hugging Face's config.json",
    )
    machine: str = setting(
        MISSING,
        f"{', '.join(machine_names())}, or a TOML file of the same form; several kinds"
        " with their number of devices, as a100-80:4,h100:4",
        metavar="NAME|FILE",
    )
    ranks: int = setting(MISSING, "devices of the job", low=1, high=MOST_RANKS)
    batch_size: int | None = setting(
        None, "rows per step (default: the preset's)", low=1, high=MOST_ROWS, metavar="ROWS"
    )
    batch_range: str | None = setting(
        None,
        "choose the rows per step, from A to B by doubling, with the most tokens per second;"
        " the fewest within 1 %",
        metavar="A:B",
    )
    seq_len: int | None = setting(
        None, "tokens per row (default: the model's)", low=1, high=1 << 24, metavar="T"
    )
    dtype: str | None = setting(
        None,
        "number format (default: the machine's with the shortest step)",
        choices=tuple(FORMATS),
    )
    activation: str | None = setting(
        None,
        "of the feed-forward network (default: the model's); relu2, the square of a ReLU, can"
        " be planned but not trained here",
        choices=ACTIVATIONS,
    )
    stack: str = setting("mpipar", "software whose efficiency is assumed", choices=tuple(STACKS))
    memory_limit: int | None = setting(
        None,
        "memory of a device, as 40G (default: the machine's)",
        in_bytes=True,
        low=1,
        below=2**63,
        metavar="BYTES",
    )
    headroom: float = setting(5.0, "memory to leave free", low=0.0, below=100.0, metavar="PERCENT")
    layout: str | None = setting(None, "short for --dp 8 --tp 8", metavar="dp=8,tp=8")
    dp: int | None = setting(None, "fix dp = N", low=1)
    pp: int | None = setting(None, "fix pp = N", low=1)
    cp: int | None = setting(None, "fix cp = N", low=1)
    tp: int | None = setting(None, "fix tp = N", low=1)
    ep: int | None = setting(None, "fix ep = N, for a model with experts", low=1)
    chunks: int | None = setting(None, "stages per pipeline rank", low=1)
    rows: int | None = setting(None, "rows of a microbatch", low=1)
    num_microbatches: int | None = setting(None, "microbatches per step and replica", low=1)
    schedule: str | None = setting(None, "fix the schedule", choices=tuple(SCHEDULES))
    recompute: str | None = setting(
        None, "fix activation recomputation", choices=FIELDS["recompute"].metadata["choices"]
    )
    zero: int | None = setting(
        None, "fix the ZeRO stage", choices=FIELDS["zero"].metadata["choices"]
    )
    sequence_parallel: bool | None = setting(None, "fix sequence parallelism, on or off")
    grad_dtype: str | None = setting(
        None,
        "format in which gradients of 16-bit weights are kept (default: the software's)",
        choices=tuple(GRADIENTS),
    )
    mfu_rule: str = setting(
        "model",
        "which FLOPs count as utilized: "
        + "; ".join(f"{name} = {text}" for name, text in MFU_RULES.items()),
        choices=tuple(MFU_RULES),
    )
    top: int = setting(5, "number of layouts to print", low=1, high=100, metavar="K")
    sites: str | None = setting(
        None,
        "the devices are in N sites, each linked to the others with so many Gbit/s and"
        " milliseconds; report which axis should cross the link",
        metavar="N:GBITS:MS",
    )
    failure_hours: float | None = setting(
        None,
        "a device fails once in so many hours: report how often to save",
        above=0.0,
        below=1e12,
        metavar="H",
    )
    save_seconds: float | None = setting(
        None,
        "with --failure-hours: how long a save takes (default 30)",
        above=0.0,
        below=1e12,
        metavar="S",
    )
    confirm: bool = switch(
        "run the first layout on shapes with mpipar's own code, and print what"
        " its ranks would keep and send"
    )
    json: bool = switch("print everything as JSON and nothing else")
    csv: bool = switch("print the layouts as CSV and nothing else")


def problems(args: Arguments) -> list[UserError]:
    """Return what is wrong between the arguments, or with the model and machine they name."""
    found, errors = [], []
    try:
        question_of(args, job_of(args.model))
    except UserError as error:
        errors.append(error)
    fixed = fixed_parts(args, found)
    found += [*fixed_problems(args, fixed), *unused_problems(args)]
    for read_text, text in ((sites_of, args.sites), (batch_range, args.batch_range)):
        try:
            read_text(text or "")
        except UsageError as error:
            found += error.problems if text is not None else []
    count = (args.sites or "").partition(":")[0]
    if count.isdecimal() and int(count) and args.ranks % int(count):
        found.append(
            f"--sites {brief(args.sites)}: {args.ranks} devices do not make {count} equal sites"
        )
    if args.batch_range is not None and args.batch_size is not None:
        found.append("--batch-size and --batch-range: give one of them")
    return [UsageError(found), *errors] if found else errors


def fixed_parts(args: Arguments, found: list[str]) -> dict[str, object]:
    """Return the fixed parts of the layout; problems of --layout are added to `found`."""
    return expand_layout(
        {
            name: getattr(args, name)
            for name in (*FIXED, "layout")
            if getattr(args, name) is not None
        },
        found,
        LAYOUT,
    )


def names_kinds(machine: str) -> bool:
    """Return whether --machine names several kinds of devices, as a100-80:4,h100:4."""
    return ":" in machine


def named_machines(text: str) -> dict[str, int]:
    """Return {name: devices} of --machine; 0 devices for a single one. Raises UsageError."""
    if not names_kinds(text):
        return {text: 0}
    parts = [part.rpartition(":") for part in text.split(",")]
    found = {name: int(count) for name, _, count in parts if count.isdecimal() and len(count) < 9}
    if len(found) < max(2, len(parts)) or not all(found) or not all(found.values()):
        raise UsageError(
            f"--machine {brief(text)}: several kinds are machines with their number of"
            " devices, each machine once, as a100-80:4,h100:4; a single one has no"
            " number"
        )
    return found


def clusters_of(names, dtype: str | None) -> tuple[list[Cluster], str]:
    """Return (machines with their rates in a number format, that format).

    The default is the best 16-bit format that all have. Raises UsageError and DataError.
    """
    clusters = [load_cluster(name) for name in names]
    if len({cluster.name for cluster in clusters}) < len(clusters):
        raise UsageError(
            f"--machine: several kinds are named {clusters[0].name}; give each file a"
            " name of its own"
        )
    dtype = dtype or min((cluster.dtype_16 for cluster in clusters), key=FORMATS.index)
    found = []
    for cluster in clusters:
        if dtype not in cluster.peak_tflops:
            known = [one for one in FORMATS if one in cluster.peak_tflops]
            found.append(
                f"--dtype {dtype}: {cluster.name} has no rate for it; use one of {', '.join(known)}"
            )
    if found:
        raise UsageError(found)
    return [cluster.with_dtype(dtype) for cluster in clusters], dtype


def question_of(args: Arguments, job: Job) -> Question:
    """Return what the flags ask about a model.

    args: without `problems`. Raises UsageError with what is wrong for this model and machine.
    """
    model, problems = job.config.model, []
    if args.seq_len is not None:
        longest = None
        if job.flags.startswith("--init-from"):
            problems += row_problems(model, args.seq_len)
            longest = model.longest_row
        model = replace(model, seq_len=args.seq_len, max_positions=longest)
    preset = PRESETS[job.config.run.preset]["batch_size"]
    batch = job.config.train.batch_size or preset if args.batch_size is None else args.batch_size
    machines = named_machines(args.machine)
    clusters, dtype = clusters_of(machines, args.dtype)
    given, share = args.memory_limit and args.memory_limit / GIB, 1 - args.headroom / 100
    kinds = tuple(
        Kind(cluster, count or args.ranks, (given or cluster.memory_gib) * share)
        for cluster, count in zip(clusters, machines.values(), strict=True)
    )
    devices = sum(kind.ranks for kind in kinds)
    if devices != args.ranks:
        problems.append(f"--ranks {args.ranks}: the machines of --machine have {devices} devices")
    fixed = fixed_parts(args, [])
    ep, experts = fixed.get("ep", 1), getattr(model, "experts", None)
    if ep > 1 and not experts:
        problems.append(f"--ep {ep}: MODEL {brief(args.model)} has no experts; leave it out")
    elif ep > 1 and experts % ep:
        problems.append(
            f"--ep {ep}: does not divide the {experts} experts; use one of"
            f" {', '.join(map(str, divisors(experts)))}"
        )
    dp = fixed.get("dp", 1)
    if dp > 0 and batch % dp and args.batch_range is None:
        near = [rows for rows in (batch - batch % dp, batch + dp - batch % dp) if rows]
        problems.append(
            f"--batch-size {batch}: is not a multiple of --dp {dp}; use"
            f" {' or '.join(map(str, near))}"
        )
    if problems:
        raise UsageError(problems)
    stack = STACKS[args.stack].with_dtype(dtype)
    if args.grad_dtype:
        stack = replace(stack, gradient_bytes=GRADIENTS[args.grad_dtype])
    shape = Shape.of(model.completed())
    shape = replace(shape, activation=args.activation or shape.activation)
    return Question(shape, kinds, stack, batch, fixed, args.mfu_rule, dtype)


def batch_range(text: str) -> tuple[int, int]:
    """Return A and B of --batch-range. Raises UsageError."""
    first, colon, last = text.partition(":")
    if not (
        colon
        and first.isdecimal()
        and last.isdecimal()
        and len(text) < 20
        and 1 <= int(first) <= int(last) <= min(int(first) << 12, MOST_ROWS)
    ):
        raise UsageError(
            f"--batch-range {brief(text)}: must be A:B with 1 <= A <= B <="
            f" {MOST_ROWS:,}, as in 256:2048"
        )
    return int(first), int(last)


def sites_of(text: str) -> Sites:
    """Return the sites of --sites. Raises UsageError."""
    try:
        count, gbits, milliseconds = text.split(":")
        sites = Sites(int(count), float(gbits), float(milliseconds))
    except ValueError:
        sites = Sites(0, 0, 0)
    if not (2 <= sites.count <= 1024 and 0 < sites.gbits <= 1e6 and 0 <= sites.milliseconds <= 1e4):
        raise UsageError(
            f"--sites {brief(text)}: must be sites, Gbit/s and milliseconds, as in 2:400:10"
        )
    return sites


def row_problems(model, seq_len: int) -> list[str]:
    """Return why weights cannot read rows of so many tokens, if they can't. model: theirs."""
    longest = model.completed().longest_row
    if seq_len <= longest:
        return []
    return [
        (
            f"--seq-len {seq_len}: the weights are made for rows of at most {longest} tokens; use"
            " that, or leave it out"
        )
    ]


def unused_problems(args: Arguments) -> list[str]:
    """Return flags that have no effect together with the others."""
    found = ["--json and --csv: give one of them"] if args.json and args.csv else []
    alone = "--json" if args.json else "--csv" if args.csv else None
    given = {
        "--confirm": args.confirm,
        "--sites": args.sites is not None,
        "--failure-hours": args.failure_hours is not None,
    }
    found += [
        f"{flag}: adds to the text, but {alone} prints none; give one of them"
        for flag, is_given in given.items()
        if is_given and alone
    ]
    if names_kinds(args.machine) and args.memory_limit:
        found.append("--memory-limit: applies to a single kind of device; leave it out")
    if args.grad_dtype and args.dtype == "float32":
        found.append(
            f"--grad-dtype {args.grad_dtype}: is for 16-bit weights, and --dtype is"
            " float32; leave one of them out"
        )
    if args.save_seconds is not None and args.failure_hours is None:
        found.append(
            f"--save-seconds {args.save_seconds:g}: belongs to --failure-hours; add it, or"
            " leave it out"
        )
    return found


def fixed_problems(args: Arguments, fixed: dict) -> list[str]:
    """Return what is wrong with the fixed parts of a layout."""
    found = []
    product = 1
    for name in LAYOUT:
        if fixed.get(name, 1) < 1:  # of --layout
            found.append(f"--{name} {fixed[name]}: must be at least 1")
        elif name in AXES:
            product *= fixed.get(name, 1)
    if "chunks" in fixed and fixed.get("schedule") != "interleaved":
        found.append(
            f"--chunks {fixed['chunks']}: only interleaved takes any number; add"
            " --schedule interleaved, or leave it out"
        )
    if fixed.get("pp") == 1 and "schedule" in fixed:
        found.append(
            f"--schedule {fixed['schedule']}: orders the passes of several stages, but"
            " --pp is 1; give one of them"
        )
    if not found and args.ranks % product:
        found.append(
            f"--ranks {args.ranks}: is not a multiple of {product}, the ranks of the given"
            f" axes; use {-(-args.ranks // product) * product}, or leave an axis out"
        )
    return found


def job_of(text: str) -> Job:
    """Return the Job of a preset, a TOML file or a folder. Raises UserError."""
    quoted = shlex.quote(text)
    if text in PRESETS:
        return Job(build({"preset": text}), f"--preset {quoted}")
    if text.endswith(".toml"):
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
    return Job(config, flags)
