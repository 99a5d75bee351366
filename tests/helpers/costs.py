"""The cost of each test: processor seconds, including the programs that it starts.

    MPIPAR_COSTS=/tmp/costs .venv/bin/python -m pytest -n 2 --dist worksteal
    .venv/bin/python tests/helpers/costs.py /tmp/costs

Each process of pytest, ranks of the MPI sessions included, appends to a file of its own in that
folder. The second command adds up the cases of each test and prints the slowest. Seconds of a clock
would depend on what else runs.
"""

import ast
import json
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = os.environ.get("MPIPAR_COSTS")
ROOT = Path(__file__).resolve().parents[2]
SHOWN = 30
SESSIONS = "tests/test_mpi_sessions.py"  # what runs inside has rows of its own


def processor_seconds() -> float:
    """Return those of this process and of all that it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Append a line: the test with its set-up and clean-up."""
    used = processor_seconds()
    try:
        return (yield)
    finally:
        if FOLDER is not None:
            row = {"test": item.nodeid, "processor_s": processor_seconds() - used}
            with (Path(FOLDER) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def first_sentence(test: str) -> str:
    """Return what a test is for: of its docstring, else of its file's."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    made = (node for node in tree.body if getattr(node, "name", "") == name)
    text = ast.get_docstring(next(made)) or ast.get_docstring(tree) or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def slowest(folder: Path) -> list[dict]:
    """Return the rows of the tests that cost most, and of all together, in processor seconds."""
    seconds: dict[str, float] = defaultdict(float)
    cases: dict[str, set[str]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for row in map(json.loads, path.read_text().splitlines()):
            name = row["test"].partition("[")[0]
            if not (name.startswith(SESSIONS) and name.endswith("session")):
                seconds[name] += row["processor_s"]
                cases[name].add(row["test"])
    order = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN]
    rows = [
        {
            "test": name.removeprefix("tests/"),
            "cases": len(cases[name]),
            "processor_s": round(seconds[name], 1),
            "buys": first_sentence(name),
        }
        for name in order
    ]
    return [
        *rows,
        {
            "test": "all",
            "cases": sum(map(len, cases.values())),
            "processor_s": round(sum(seconds.values())),
            "buys": "",
        },
    ]


if __name__ == "__main__":
    for row in slowest(Path(sys.argv[1])):
        print(*row.values(), sep="  ")
