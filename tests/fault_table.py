"""The table of faults in docs/failures.md, made from the tests that are marked `fault`.

    python -m pytest -m "fault and (slow or not slow)" --faults=bench/results/faults.json

Each start adds the columns of its own MPI library; python -m bench.docs then draws the table.
"""

import fnmatch
import json
import subprocess
from pathlib import Path

import pytest
from helpers import find_launcher

from bench import results

LIBRARIES = {"HYDRA": "MPICH", "Open MPI": "Open MPI"}
# Faults whose tests stand elsewhere: (number, fault, exit code, pattern of the test's name). A code
# of None: the launcher decides it, or the test starts no job.
ELSEWHERE = (
    (5, "ranks with other flags", 69,
     "test_launch.py::test_ranks_that_differ_end_before_the_first_step*"),
    (7, "a run folder that a rank does not see", 74,
     "test_status.py::test_a_run_folder_that_a_rank_does_not_see_is_74"),
    (12, "data of more than 4 GiB", None, "test_source.py::test_data_of_more_than_4_gib"),
    (15, "kill -9 at each call of a save", None,
     "test_state_kill.py::test_the_newest_committed_checkpoint_is_found*"),
    (18, "a stray file of another layout", 0,
     "test_state_damage.py::test_a_stray_file_is_reported_and_not_read*"),
    (20, "a checkpoint of another model", 65,
     "test_state.py::test_another_model_is_refused_with_a_table*"),
    (21, "two jobs on one run folder", 2, "test_lock.py::test_two_starts_with_one_folder_at_once"),
    (22, "no space at the start, or for the weights", 74,
     "test_run_ends.py::test_full_disk_is_said_with_code_74*"),
    (22, "no space at an interval: a warning, and the run goes on", 0,
     "test_resume_runs.py::test_no_space_at_an_interval_is_a_warning"),
    (22, "no space at the last save", 74,
     "test_resume_runs.py::test_no_space_at_the_end_keeps_the_former_checkpoint"),
    (23, "hostile manifests", 65, "test_state_damage.py::test_a_hostile_manifest_is_refused*"),
    (25, "kill -9 of a rank: the next start and ckpt ls name it", None,
     "test_status.py::test_a_killed_rank_is_named_by_ls_and_by_the_next_start"),
    (26, "an exception in a helper thread", 70,
     "test_launch.py::test_failure_on_one_rank_ends_the_job[[]thread*"),
    (27, "SIGUSR1 to the launcher", 75,
     "test_ctrl_c.py::test_in_training_the_run_ends_with_its_weights[[]2-*"),
    (29, "Ctrl-C twice", 130, "test_launch.py::test_only_a_second_ctrl_c_does_not_wait"),
    (30, "SIGSTOP of a rank", 76, "test_hang.py::test_a_stopped_process_is_missing*"),
    (30, "an infinite loop in a rank", 76,
     "test_hang.py::test_a_stuck_rank_is_named_with_what_it_does[[]spin*"),
    (31, "a slow rank: named, with its line and its share of the waits", 0,
     "test_trace.py::test_the_command_names_the_late_rank_the_barrier_and_the_line"),
    (32, "a loss that is not finite", 79,
     "test_run_ends.py::test_non_finite_loss_ends_all_ranks"),
    (34, "kill -9 of the launcher and its daemon while ranks compute", None,
     "test_launch.py::test_ranks_whose_launcher_was_killed_end[[]computing*"),
    (37, "hosts with other versions of Python, NumPy or mpi4py", 69,
     "test_compared.py::test_the_table_names_field_ranks_and_values"),
    (35, "a launcher of another MPI library", 69,
     "test_launch.py::test_open_mpi_under_mpich_s_launcher_and_the_reverse"),
    (38, "MPI without MPI_THREAD_MULTIPLE", 70,
     "test_launch.py::test_failure_on_one_rank_ends_the_job[[]single*"),
    (38, "srun that does not speak the library's PMI", 69,
     "test_launch.py::test_one_of_many_that_finds_itself_alone_stops"),
    (39, "a layer too large for the memory of a rank", 69,
     "test_memory_limit.py::test_a_layer_too_large_for_one_rank_names_a_layout_that_trains"),
)
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


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    for item in items:
        name = f"{item.path.name}::{item.name}"
        for number, what, code, pattern in ELSEWHERE:
            if fnmatch.fnmatch(name, pattern):
                item.add_marker(fault(number, what, code))


def pytest_sessionfinish(session):
    path = session.config.getoption("--faults")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path and not hasattr(session.config, "workerinput"):
        reports = [report for state in ("passed", "failed") for report in reporter.getreports(state)
                   if report.when == "call"]
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
