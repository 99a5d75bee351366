"""Every exercise by its number, in the order of the chapters."""

from __future__ import annotations

from mpipar.learn import (
    bugs,
    lateness,
    readers_code,
    readers_layout,
    readers_schedule,
)
from mpipar.learn.exercise import Exercise
from mpipar.learn.questions import machines, products, workers

CHAPTERS = (  # of docs/tour/, from 1
    "Five minutes",
    "One worker",
    "A wire",
    "Layers on workers, and why they idle",
    "Microbatches",
    "One product split",
    "Attention, vocabulary, loss",
    "Copies",
    "Hybrids",
    "I and W apart",
    "Who waits for whom",
    "Tiles",
    "16 bits",
    "Predicted and measured",
    "Is this run possible?",
    "Long context and sharded state",
    "Experts",
)
QUESTIONS = (workers, products, machines)  # each of their exercises has a name
PARTS = (readers_code, readers_schedule, readers_layout, lateness, bugs)


def order(number: str) -> tuple[int, str]:
    """Return an exercise's sort key: 2a comes before 10a."""
    return int(number[:-1]), number[-1]


EXERCISES: dict[str, Exercise] = {
    one.id: one
    for one in sorted(
        [
            *(
                one
                for part in QUESTIONS
                for one in vars(part).values()
                if isinstance(one, Exercise)
            ),
            *(one for part in PARTS for one in part.exercises()),
        ],
        key=lambda one: order(one.id),
    )
}
