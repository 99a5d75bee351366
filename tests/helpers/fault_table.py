"""The table of faults in docs/failures.md, made from the tests that are marked `fault`.

    python -m pytest -m "fault and (slow or not slow)" --faults=bench/results/faults.json

Each start adds the columns of its own MPI library; python -m docs.build then draws the table.
"""

import json
import subprocess
from pathlib import Path

import pytest
from helpers import find_launcher

from bench import results

LIBRARIES = {"HYDRA": "MPICH", "Open MPI": "Open MPI"}
# What no test here can run: (number, fault, why).
NOT_RUN = (
    (36, "GPU buffers and an MPI that takes none", "needs a GPU"),
    (39, "GPU memory is full on one rank", "needs a GPU"),
    (40, "more ranks than GPUs, or a driver that is too old", "needs a GPU"),
)
COLUMNS = ("number", "fault", "MPICH_exit_code", "MPICH_s", "Open_MPI_exit_code", "Open_MPI_s")


def fault(number: int, what: str, code):
    """The mark of a test of one of the faults; code: the exit code, None for the launcher's own."""
    return pytest.mark.fault(number, what, code)


def pytest_addoption(parser):
    parser.addoption("--faults", help="write what the tests of faults found into this file")


def pytest_sessionfinish(session):
    path = session.config.getoption("--faults")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path and not hasattr(session.config, "workerinput"):
        reports = [
            report
            for state in ("passed", "failed")
            for report in reporter.getreports(state)
            if report.when == "call"
        ]
        write(Path(path), found(reports), library())


def library() -> str:
    """The MPI library whose launcher the tests use."""
    launcher = find_launcher()
    assert launcher is not None, "no mpiexec: install the extra mpich or openmpi"
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=True)
    return next(name for word, name in LIBRARIES.items() if word in said.stdout)


def found(reports) -> dict:
    """{(number, fault): (exit code, seconds or "fails")}; of several tests, the longest."""
    rows: dict = {}
    for report in reports:
        properties = dict(report.user_properties)
        for name, value in report.user_properties:
            if name != "fault":
                continue
            number, what, code = value
            before = rows.get((number, what), (code, 0.0))
            code = properties.get("exit_code", code)
            code = "-" if code is None else code if code >= 0 else 128 - code  # as a shell says
            if report.failed or before[1] == "fails":
                rows[number, what] = code, "fails"
            else:
                rows[number, what] = code, max(round(report.duration, 1), before[1])
    return rows


def write(path: Path, rows: dict, mpi: str) -> None:
    """Write the table; the columns of another library stay as they were."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    table = {(row["number"], row["fault"]): row for row in before}
    ours = [column for column in COLUMNS if column.startswith(mpi.replace(" ", "_"))]
    for key, (code, seconds) in rows.items():
        row = table.setdefault(key, dict(zip(COLUMNS, (*key, "", "", "", ""), strict=True)))
        row.update(zip(ours, (code, seconds), strict=True))
    for number, what, why in NOT_RUN:
        table[number, what] = dict(zip(COLUMNS, (number, what, why, "", why, ""), strict=True))
    lines = sorted(table.values(), key=lambda row: (row["number"], row["fault"]))
    results.write(str(path), "tests marked fault", lines)
