"""Exercise 5b: a schedule that holds less than GPipe and takes no longer. Fill the blank, then

    python -m pytest docs/examples/exercises/one_f_one_b.py

A line of a schedule is what one worker does, in order: 0F0 is stage 0, forward, microbatch 0, and
0B0 its whole backward, as `mpipar schedule gpipe --pp 4 --num-microbatches 8 --csv -` prints them.
"""

from pathlib import Path

from mpipar.pipeline.csv_format import read_csv
from mpipar.study.schedules.simulate import Costs, simulate

WORKERS, MICROBATCHES = 4, 8


def lines() -> list[str]:
    """Return one line for each worker, with commas between its passes."""
    ...  # your code


def test_as_short_as_gpipe_with_half_its_memory(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("\n".join(lines()) + "\n")
    schedule = read_csv(tmp_path / "mine.csv")  # proves it: nothing is missing, nobody waits
    assert (schedule.pp_size, schedule.num_microbatches) == (WORKERS, MICROBATCHES)
    timeline = simulate(schedule, Costs())  # F takes 1 unit, I and W 1 each
    assert timeline.makespan <= 33
    assert max(timeline.peak_stash) <= 4
