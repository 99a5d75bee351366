"""`mpipar plan MODEL --machine NAME --ranks N`: which layout, why, and how sure; without MPI."""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from mpipar.checkpoint.formats import model_settings
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import config_problems
from mpipar.config.sections import build
from mpipar.config.sizes import read_bytes
from mpipar.console import output
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, DataError, UsageError, suggestion
from mpipar.files.bounded import read_toml
from mpipar.files.text import brief
from mpipar.plan import report as plan_report
from mpipar.plan.cluster import STACKS, load_cluster, machine_names
from mpipar.plan.confirm import confirm
from mpipar.plan.page import page
from mpipar.plan.search import FIXED, SCHEDULES, Question, search
from mpipar.plan.shape import MFU_RULES, Shape
from mpipar.plan.sites import Sites

MOST_RANKS = 1 << 17
MOST_ROWS = 1 << 24  # of a step
SAVE_SECONDS = 30.0
RECOMPUTE = ("none", "attention", "block")


def add_arguments(parser) -> None:
    """Add the model, the machine, and what is given of the layout."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a TOML file of mpipar train, or a folder with"
        " Hugging Face's config.json")
    add("--machine", required=True, metavar="NAME|FILE",
        help=f"{', '.join(machine_names())}, or a TOML file of the same form")
    add("--ranks", type=int, required=True, metavar="N", help="devices of the job")
    add("--batch-size", type=int, metavar="ROWS", help="rows of a step (default: the preset's)")
    add("--batch-range", metavar="A:B", help="take the rows of a step, from A to B by doubling,"
        " that give the most tokens a second; the fewest within 1 %%")
    add("--seq-len", type=int, metavar="T", help="tokens of a row (default: the model's)")
    add("--stack", choices=tuple(STACKS), default="megatron",
        help="software whose efficiency is assumed (default megatron)")
    add("--memory-limit", metavar="BYTES", help="of a device, as 40G (default: the machine's)")
    add("--headroom", type=float, default=5.0, metavar="PERCENT",
        help="memory that stays free (default 5)")
    for name in ("dp", "pp", "cp", "tp", "chunks"):
        add(f"--{name}", type=int, metavar="N", help=argparse_help(name))
    add("--rows", type=int, metavar="N", help="rows of a microbatch")
    add("--schedule", choices=SCHEDULES, help="take this schedule")
    add("--recompute", choices=RECOMPUTE, help="take this recomputation")
    add("--zero", type=int, choices=(0, 1, 3), help="take this sharding of states")
    add("--sequence-parallel", action="store_true", default=None, help="take sequence parallelism")
    add("--mfu-rule", choices=tuple(MFU_RULES), default="model",
        help="which FLOPs count as used: " + "; ".join(
            f"{name} = {text}" for name, text in MFU_RULES.items()))
    add("--top", type=int, default=5, metavar="K", help="layouts to print (default 5)")
    add("--sites", metavar="N:GBITS:MS", help="the devices are in N sites, each with a link of so"
        " many Gbit/s and milliseconds to the others; say which axis crosses it")
    add("--failure-hours", type=float, metavar="H", help="a device fails once in so many hours:"
        " say how often to save")
    add("--save-seconds", type=float, metavar="S",
        help="with --failure-hours: what a save takes (default 30)")
    add("--confirm", action="store_true", help="run the first layout on shapes by mpipar's own"
        " code, and print what its ranks would keep and send")
    add("--html", metavar="FILE", help="also write the answer as a page with pictures")
    add("--json", action="store_true", help="print everything as JSON and nothing else")
    add("--csv", action="store_true", help="print the layouts as CSV and nothing else")


def argparse_help(name: str) -> str:
    """The help of a flag that fixes an axis."""
    return "stages of each pipeline rank" if name == "chunks" else f"take {name} = N"


def run(args) -> int:
    """Print the plan; return 0 if a layout fits, else 1.

    Raises UsageError with everything that is wrong, and DataError for files that cannot be read.
    """
    question, typed = question_of(args)
    question, plan, batches = chosen_batch(args, question)
    if args.html is not None:
        output.write_text(Path(args.html), page(question, plan, typed))
    if args.json:
        print(json.dumps(plan_report.as_dict(question, plan), indent=1))
    elif args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(plan_report.csv_rows(question, plan))
    else:
        print(plan_report.report(question, plan, typed))
        if args.confirm and plan.best:
            found = confirm(question, config_of(args.model)[0], plan.best[0].layout)
            print(f"\n{plan_report.own_table(*found)}")
        if args.failure_hours and plan.best:
            print("\n" + plan_report.saving(
                question, plan.best[0].step.total, args.save_seconds or SAVE_SECONDS,
                args.failure_hours))
        if args.sites and plan.best:
            print(f"\n{plan_report.sites_table(question, plan, sites_of(args.sites))}")
        if len(batches) > 1:
            print(f"\n{plan_report.batch_table(batches)}")
    return EXIT_OK if plan.best else EXIT_CHECK_FAILED


def chosen_batch(args, question: Question):
    """(question, plan, {rows of a step: plan}) of the rows that --batch-range leaves to choose."""
    if args.batch_range is None:
        return question, search(question, args.top), {}
    first, last = batch_range(args.batch_range)
    plans, rows = {}, first
    while rows <= last:
        plans[rows] = search(question._replace(batch_size=rows), args.top)
        rows *= 2
    rates = {rows: rows / plan.best[0].step.total for rows, plan in plans.items() if plan.best}
    most = max(rates.values(), default=0.0)
    best = min((rows for rows, rate in rates.items() if rate >= 0.99 * most), default=first)
    return question._replace(batch_size=best), plans[best], plans


def batch_range(text: str) -> tuple[int, int]:
    """A and B of --batch-range. Raises UsageError."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and len(text) < 20
            and 1 <= int(first) <= int(last) <= min(int(first) << 12, MOST_ROWS)):
        raise UsageError(f"--batch-range {brief(text)}: must be A:B with 1 <= A <= B <="
                         f" {MOST_ROWS:,}, as in 256:2048")
    return int(first), int(last)


def sites_of(text: str) -> Sites:
    """The sites of --sites. Raises UsageError."""
    try:
        count, gbits, milliseconds = text.split(":")
        sites = Sites(int(count), float(gbits), float(milliseconds))
    except ValueError:
        sites = Sites(0, 0, 0)
    if not (2 <= sites.count <= 1024 and 0 < sites.gbits <= 1e6 and 0 <= sites.milliseconds <= 1e4):
        raise UsageError(f"--sites {brief(text)}: must be sites, Gbit/s and milliseconds, as in"
                         " 2:400:10")
    return sites


def question_of(args) -> tuple[Question, str]:
    """What the flags ask, and the flags of `mpipar train` that name the model."""
    config, typed = config_of(args.model)
    problems = []
    model = config.model
    if model.model != "decoder":
        problems.append(f"MODEL {brief(args.model)}: is a {model.model}; plans are for decoders")
    elif args.seq_len is not None:
        if typed.startswith("--init-from"):
            problems += row_problems(model, args.seq_len)
        model = replace(model, seq_len=args.seq_len, max_positions=None)
    batch = config.train.batch_size or PRESETS[config.run.preset]["batch_size"]
    batch = batch if args.batch_size is None else args.batch_size
    limits = {"--ranks": (args.ranks, 1, MOST_RANKS), "--batch-size": (batch, 1, MOST_ROWS),
              "--seq-len": (getattr(model, "seq_len", 1), 1, 1 << 24), "--top": (args.top, 1, 100)}
    problems += [f"{flag} {brief(str(value))}: must be from {low} to {high:,}"
                 for flag, (value, low, high) in limits.items() if not low <= value <= high]
    problems += [f"{flag} {value:g}: must be more than 0" for flag, value in (
        ("--failure-hours", args.failure_hours), ("--save-seconds", args.save_seconds))
        if value is not None and not 0 < value < 1e12]
    if not 0 <= args.headroom < 100:
        problems.append(f"--headroom {args.headroom:g}: is a share of the memory in percent; use a"
                        " number from 0 to 99")
    cluster = load_cluster(args.machine)
    gib = cluster.memory_gib
    if args.memory_limit is not None:
        try:
            gib = read_bytes(args.memory_limit) / (1 << 30)
        except ValueError as error:
            problems.append(f"--memory-limit {brief(args.memory_limit)}: {error}")
    fixed = {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None}
    problems += [*fixed_problems(args, fixed), *unused_problems(args)]
    if args.sites is not None:
        try:
            sites_of(args.sites)
        except UsageError as error:
            problems += error.problems
    if args.batch_range is not None:
        try:
            batch = batch_range(args.batch_range)[0]
        except UsageError as error:
            problems += error.problems
        if args.batch_size is not None:
            problems.append("--batch-size and --batch-range: give one of them")
    if problems:
        raise UsageError(problems)
    return Question(Shape.of(model.completed()), cluster, STACKS[args.stack], args.ranks, batch,
                    gib * (1 - args.headroom / 100), fixed, args.mfu_rule), typed


def row_problems(model, seq_len: int) -> list[str]:
    """What keeps weights from reading rows of so many tokens. model: theirs."""
    if model.positions == "learned" and seq_len != model.seq_len:
        return [(f"--seq-len {seq_len}: the weights have learned positions of {model.seq_len}"
                 " tokens; leave it out")]
    if model.positions == "rope" and seq_len > model.completed().max_positions:
        return [(f"--seq-len {seq_len}: the weights are made for rows of"
                 f" {model.completed().max_positions} tokens at most; use that, or leave it out")]
    return []


def unused_problems(args) -> list[str]:
    """Flags that would change nothing beside the others."""
    found = ["--json and --csv: give one of them"] if args.json and args.csv else []
    alone = "--json" if args.json else "--csv" if args.csv else None
    given = {"--confirm": args.confirm, "--sites": args.sites is not None,
             "--failure-hours": args.failure_hours is not None}
    found += [f"{flag}: adds to the text, and {alone} prints none; give one of them"
              for flag, is_given in given.items() if is_given and alone]
    if args.save_seconds is not None and args.failure_hours is None:
        found.append(f"--save-seconds {args.save_seconds:g}: belongs to --failure-hours; add it, or"
                     " leave it out")
    return found


def fixed_problems(args, fixed: dict) -> list[str]:
    """What is wrong with the given parts of a layout."""
    found = []
    product = 1
    for name in ("dp", "pp", "cp", "tp", "chunks", "rows"):
        if name in fixed and fixed[name] < 1:
            found.append(f"--{name} {fixed[name]}: must be at least 1")
        elif name in ("dp", "pp", "cp", "tp"):
            product *= fixed.get(name, 1)
    if "chunks" in fixed and fixed.get("schedule") != "interleaved":
        found.append(f"--chunks {fixed['chunks']}: only interleaved takes any number; add"
                     " --schedule interleaved, or leave it out")
    if fixed.get("pp") == 1 and "schedule" in fixed:
        found.append(f"--schedule {fixed['schedule']}: orders the passes of several stages, and"
                     " --pp is 1; give one of them")
    if not found and args.ranks > 0 and args.ranks % product:
        found.append(f"--ranks {args.ranks}: is not a multiple of {product}, the ranks of the given"
                     f" axes; use {-(-args.ranks // product) * product}, or leave an axis out")
    return found


def config_of(text: str):
    """(Config, flags that name it) of a preset, a TOML file or a folder. Raises UserErrors."""
    quoted = shlex.quote(text)
    if text in PRESETS:
        return build({"preset": text}), f"--preset {quoted}"
    if text.endswith(".toml"):
        values = {name.replace("-", "_"): value
                  for name, value in read_toml(text, UsageError).items()}
        config, flags = build(values), f"--config {quoted}"
    elif os.path.isdir(text) or os.path.basename(text) == "config.json":
        folder = text if os.path.isdir(text) else os.path.dirname(text) or "."
        config, flags = build(model_settings(folder)), f"--init-from {shlex.quote(folder)}"
    else:
        close = suggestion(text, list(PRESETS))
        raise UsageError(f"MODEL {brief(text)}: is no preset{close}; use one of"
                         f" {', '.join(PRESETS)}, a file that ends in .toml, or a folder with"
                         " config.json")
    if wrong := config_problems(config):
        raise DataError([f"MODEL {brief(text)}: {one}" for one in wrong])
    return config, flags
