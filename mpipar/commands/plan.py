"""`mpipar plan MODEL --machine NAME --ranks N`: which layout, why, and how sure; without MPI."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from mpipar.commands.plan_question import (
    ACTIVATIONS,
    batch_range,
    job_of,
    question_of,
    sites_of,
)
from mpipar.commands.resolve import resolve
from mpipar.config.memory import MemoryConfig
from mpipar.config.reading import Reading
from mpipar.config.sections import FIELDS
from mpipar.console import output
from mpipar.console.progress import status_line
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from mpipar.plan import report as plan_report
from mpipar.plan.cluster import STACKS, machine_names
from mpipar.plan.confirm import Job, confirm, train_config
from mpipar.plan.formats import FORMATS, search_formats
from mpipar.plan.mixed import search_mixed
from mpipar.plan.mixed_report import mixed_dict, mixed_report
from mpipar.plan.page import page
from mpipar.plan.search import SCHEDULES, Plan, Question, search
from mpipar.plan.shape import MFU_RULES

SAVE_SECONDS = 30.0


def add_arguments(parser) -> None:
    """Add the model, the machine, and what is given of the layout."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a preset, a TOML file of mpipar train, or a folder with"
        " Hugging Face's config.json")
    add("--machine", required=True, metavar="NAME|FILE",
        help=f"{', '.join(machine_names())}, or a TOML file of the same form; several kinds with"
             " their devices as a100-80:4,h100:4")
    add("--ranks", type=int, required=True, metavar="N", help="devices of the job")
    add("--batch-size", type=int, metavar="ROWS", help="rows of a step (default: the preset's)")
    add("--batch-range", metavar="A:B", help="take the rows of a step, from A to B by doubling,"
        " that give the most tokens a second; the fewest within 1 %%")
    add("--seq-len", type=int, metavar="T", help="tokens of a row (default: the model's)")
    add("--dtype", choices=FORMATS, help="format of numbers (default: the machine's with the"
        " shortest step)")
    add("--activation", choices=ACTIVATIONS, help="of the feed-forward network (default: the"
        " model's); relu2, the square of a ReLU, can be planned, and not be trained here")
    add("--stack", choices=tuple(STACKS), default="megatron",
        help="software whose efficiency is assumed (default megatron)")
    add("--memory-limit", metavar="BYTES", help="of a device, as 40G (default: the machine's)")
    add("--headroom", type=float, default=5.0, metavar="PERCENT",
        help="memory that stays free (default 5)")
    add("--layout", metavar="dp=8,tp=8", help="short for --dp 8 --tp 8")
    for name in ("dp", "pp", "cp", "tp", "chunks"):
        add(f"--{name}", type=int, metavar="N", help=argparse_help(name))
    add("--rows", type=int, metavar="N", help="rows of a microbatch")
    add("--num-microbatches", type=int, metavar="N", help="microbatches of a replica in a step")
    add("--schedule", choices=SCHEDULES, help="take this schedule")
    for name, text in (("recompute", "recomputation"), ("zero", "sharding of states")):
        add(f"--{name}", type=type(getattr(MemoryConfig, name)),
            choices=FIELDS[name].metadata["choices"], help=f"take this {text}")
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=None,
        help="take sequence parallelism, or leave it out")
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
    job = job_of(args.model)
    question, kinds = question_of(args, job)
    with status_line(None) as line:
        tell = line.show if line else lambda text: None
        if kinds:
            return run_mixed(args, question, kinds, job, tell)
        question, plan, batches = chosen_batch(args, question, tell)
    text = ""
    if args.html is not None or not (args.json or args.csv):
        text = answer(args, question, plan, batches, job)
    if args.html is not None:
        output.write_text(Path(args.html), page(question, plan, text))
    if args.json:
        print(json.dumps(plan_report.as_dict(question, plan, job), indent=1))
    elif args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(plan_report.csv_rows(question, plan))
    else:
        print(text)
    return EXIT_OK if plan.best else EXIT_CHECK_FAILED


def run_mixed(args, question: Question, kinds, job: Job, tell) -> int:
    """Print the plan over several kinds of devices; return 0 if a layout fits, else 1."""
    plan = search_mixed(question, kinds, args.top, tell)
    if args.json:
        print(json.dumps(mixed_dict(question, plan), indent=1))
        return EXIT_OK if plan.best else EXIT_CHECK_FAILED
    parts = [mixed_report(question, kinds, plan, job)]
    if plan.best:
        parts.append(refusal(question, job, plan.best[0].layout, plan.best[0].counts))
    print("\n\n".join(filter(None, parts)))
    return EXIT_OK if plan.best else EXIT_CHECK_FAILED


def answer(args, question: Question, plan: Plan, batches: dict[int, Plan], job: Job) -> str:
    """The report, and what further flags ask for."""
    parts = [plan_report.report(question, plan, job)]
    if plan.best:
        best = plan.best[0]
        parts.append(refusal(question, job, best.layout))
        if args.confirm:
            parts.append(plan_report.own_table(*confirm(question, job.config, best.layout)))
        if args.failure_hours:
            parts.append(plan_report.saving(
                question, best.step.total, args.save_seconds or SAVE_SECONDS, args.failure_hours))
        if args.sites:
            parts.append(plan_report.sites_table(question, plan, sites_of(args.sites)))
    if len(batches) > 1:
        parts.append(plan_report.batch_table(batches))
    return "\n\n".join(filter(None, parts))


def refusal(question: Question, job: Job, layout, counts: tuple[int, ...] | None = None) -> str:
    """What `mpipar train` says against the printed command, or ""."""
    wanted = train_config(question, job.config, layout, layout.num_microbatches, counts)
    try:
        resolve(Reading(wanted), layout.ranks)
    except UserError as error:
        return "mpipar train refuses this command:\n" + "\n".join(
            f"  {problem}" for problem in error.problems)
    return ""


def chosen_batch(args, question: Question, tell):
    """(question, plan, {rows of a step: plan}) of the rows that --batch-range leaves to choose.

    Without --dtype the number format is chosen, too, and stands in the question.
    """
    def found(rows: int) -> tuple[Question, Plan]:
        asked = question._replace(batch_size=rows)
        if args.dtype is None:
            return search_formats(asked, args.top, tell)
        return asked, search(asked, args.top, tell)

    if args.batch_range is None:
        return *found(question.batch_size), {}
    first, last = batch_range(args.batch_range)
    answers, rows = {}, first
    while rows <= last:
        answers[rows] = found(rows)
        rows *= 2
    plans = {rows: plan for rows, (_, plan) in answers.items()}
    rates = {rows: rows / plan.best[0].step.total for rows, plan in plans.items() if plan.best}
    most = max(rates.values(), default=0.0)
    best = min((rows for rows, rate in rates.items() if rate >= 0.99 * most), default=first)
    return *answers[best], plans
