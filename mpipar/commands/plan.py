"""`mpipar plan MODEL --machine NAME --ranks N`: which layout, why, and how certain; no MPI."""

from __future__ import annotations

import csv
import json
import sys

from mpipar.commands.command import Command, Context
from mpipar.commands.plan_question import (
    Arguments,
    batch_range,
    job_of,
    problems,
    question_of,
    sites_of,
)
from mpipar.commands.resolve import resolve
from mpipar.config.reading import ParsedConfig
from mpipar.console.progress import progress
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UserError
from mpipar.plan import report as plan_report
from mpipar.plan.confirm import Job, confirm, train_config
from mpipar.plan.formats import search_formats
from mpipar.plan.search import Candidate, Plan, Question, search

SAVE_SECONDS = 30.0


def run(context: Context) -> int:
    """Print the plan; return 0 if a layout fits, also according to --confirm, else 1.

    Raises UsageError for what is wrong for this model, DataError for files that cannot be read.
    """
    args = context.args
    job = job_of(args.model)
    question = question_of(args, job)
    with progress("plan", None, "", bar_format="{desc} [{elapsed}]") as line:

        def tell(text: str) -> None:
            line.set_description_str(text, refresh=False)
            line.update()

        question, plan, batches = chosen_batch(args, question, tell)
    own = None
    if args.confirm and plan.best:
        own = confirm(question, job.config, plan.best[0])
    if args.json:
        found = plan_report.as_dict(question, plan, job)
        if batches:
            found["batches"] = {
                rows: one.best[0].step.total if one.best else None for rows, one in batches.items()
            }
        print(json.dumps(found, indent=1))
    elif args.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(plan_report.csv_rows(question, plan))
    else:
        print(answer(args, question, plan, batches, job, own))
    good = plan.best and (own is None or plan_report.confirmed(own[0]))
    return EXIT_OK if good else EXIT_CHECK_FAILED


def answer(args, question: Question, plan: Plan, batches: dict[int, Plan], job: Job, own) -> str:
    """Return the report, and what further flags ask for. own: the result of `confirm`, or None."""
    parts = [plan_report.report(question, plan, job)]
    if plan.best:
        best = plan.best[0]
        parts.append(refusal(question, job, best))
        if args.grad_dtype not in (None, "float32"):
            parts.append("mpipar train keeps gradients in float32, whatever --grad-dtype says")
        if own is not None:
            parts.append(plan_report.own_table(*own))
        if args.failure_hours:
            parts.append(
                plan_report.saving(
                    question, best.step.total, args.save_seconds or SAVE_SECONDS, args.failure_hours
                )
            )
        if args.sites:
            parts.append(plan_report.sites_table(question, plan, sites_of(args.sites)))
    if len(batches) > 1:
        parts.append(plan_report.batch_table(batches))
    return "\n\n".join(filter(None, parts))


def refusal(question: Question, job: Job, one: Candidate) -> str:
    """Return why `mpipar train` would refuse the printed command, or ""."""
    try:
        resolve(ParsedConfig(train_config(question, job.config, one)), one.layout.ranks)
    except UserError as error:
        return "mpipar train refuses this command:\n" + "\n".join(
            f"  {problem}" for problem in error.problems
        )
    return ""


def chosen_batch(args, question: Question, tell):
    """Return (question, plan, {rows per step: plan}) for the best rows of --batch-range.

    Without --dtype the number format is chosen too, and set in the question.
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


COMMAND = Command(run, "MODEL --machine NAME --ranks N [flags]", Arguments, problems=problems)
