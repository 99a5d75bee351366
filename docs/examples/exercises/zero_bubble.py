"""Exercise 10b: a schedule with I and W apart that is nearly never idle. Fill the blank, then

    python -m pytest docs/examples/exercises/zero_bubble.py

A line of a schedule is what one worker does, in order: 0F0 is stage 0, forward, microbatch 0, 0I0
its input gradient and 0W0 its weight gradient.
"""

from pathlib import Path

from mpipar.pipeline.csv_format import read_csv
from mpipar.study.schedules.simulate import Costs, simulate

WORKERS, MICROBATCHES = 2, 8


def lines() -> list[str]:
    """Return one line for each worker, with commas between its passes."""
    ...  # your code


def test_at_most_five_percent_bubble(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("\n".join(lines()) + "\n")
    schedule = read_csv(tmp_path / "mine.csv")  # proves it: nothing is missing, nobody waits
    assert (schedule.pp_size, schedule.num_microbatches) == (WORKERS, MICROBATCHES)
    timeline = simulate(schedule, Costs())  # F, I and W take 1 unit each
    assert timeline.bubble_share <= 0.05
    assert max(timeline.peak_stash) <= 2
