"""`timeline SCHEDULE --pp P ...`: worker x time, with the flags of `mpipar schedule`."""

from __future__ import annotations

from mpipar import cli
from mpipar.commands.schedule import costs_of, title
from mpipar.pipeline.draw import svg
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import Timeline, simulate


def timeline_of(words: list[str]) -> Timeline:
    """The simulated step that the words of `mpipar schedule` describe. Raises UsageError."""
    args = cli.context_of(None, "schedule", words).args
    schedule = make_schedule(
        args.name, args.pp, args.num_microbatches, args.chunks, args.group_size)
    return simulate(schedule, costs_of(args))


def draw(words: list[str], root) -> tuple[str, str]:
    """The picture and its alt text."""
    timeline = timeline_of(words)
    shares = [100 * share for share in timeline.busy_share]
    busy = f"{min(shares):.1f} %" if max(shares) - min(shares) < 0.05 else (
        f"{min(shares):.1f} to {max(shares):.1f} %")
    alt = (f"Timeline of {title(timeline.schedule)}: a row for each worker, time to the right. Each"
           f" worker computes {busy} of the time; idle time is hatched")
    return svg(timeline, title(timeline.schedule)), alt
