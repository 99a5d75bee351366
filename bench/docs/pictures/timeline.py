"""`timeline SCHEDULE --pp P ...`: worker x time, with the flags of `mpipar schedule`."""

from __future__ import annotations

from mpipar import cli
from mpipar.commands.schedule import parse_costs, title
from mpipar.errors import UsageError
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import make_schedule, schedule_problems
from mpipar.pipeline.simulate import Timeline, simulate
from mpipar.pipeline.svg import svg


def timeline_of(words: list[str]) -> Timeline:
    """The simulated step that the words of `mpipar schedule` describe. Raises UsageError."""
    args = cli.command_parser("schedule").parse_args(words)
    counts = (args.name, args.pp, args.num_microbatches, args.chunks, args.group_size)
    if args.name is None or (found := schedule_problems(*counts)):
        raise UsageError(found if args.name else "name a schedule")
    return simulate(make_schedule(*counts), costs_of(args))


def costs_of(args) -> Costs:
    """The costs of --costs and --latency; without them a pass takes 1 and a message nothing."""
    return parse_costs(args.costs or "1,1,1", args.latency or "0")


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    timeline = timeline_of(words)
    shares = [100 * share for share in timeline.busy_share]
    busy = f"{min(shares):.1f} %" if max(shares) - min(shares) < 0.05 else (
        f"{min(shares):.1f} to {max(shares):.1f} %")
    alt = (f"Timeline of {title(timeline.schedule)}: a row for each worker, time to the right. Each"
           f" worker computes {busy} of the time; idle time is hatched")
    return svg(timeline, title(timeline.schedule)), alt
