"""What each test costs: seconds, and processor seconds with those of the programs it started.

    MPIPAR_COSTS=/tmp/costs .venv/bin/python -m pytest -n 2 --dist worksteal
    .venv/bin/python -m bench.test_costs /tmp/costs

Each process of pytest, ranks of the MPI sessions included, appends to a file of its own.
"""

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = os.environ.get("MPIPAR_COSTS")


def processor_seconds() -> float:
    """Return those of this process and of all that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append a line: the test with its set-up and clean-up, from the first to the last."""
    if FOLDER is None:
        return (yield)
    start, used = time.monotonic(), processor_seconds()
    try:
        return (yield)
    finally:
        row = {"test": item.nodeid, "s": time.monotonic() - start,
               "processor_s": processor_seconds() - used}
        with (Path(FOLDER) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
