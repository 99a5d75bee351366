"""Runs tests/equal as whole pytest sessions under mpiexec, one session for each number of ranks."""

import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers import REPOSITORY, run_ranks

SESSION_LIMIT = 1300.0  # seconds for one session: twice what the longest takes beside other tests
TEST_LIMIT = 200.0  # seconds for one test inside; then every rank prints where it is, and all end
EQUAL = REPOSITORY / "tests" / "equal"
QUICK = "not slow and not alone"
# What four ranks run at once, as two do; a slow session of four ranks runs the other files.
CORE = [
    EQUAL / name
    for name in (
        "layers/test_cuts.py",
        "train/test_twins.py",
        "train/test_broken_twins.py",
        "train/test_law.py",
        "train/test_islands.py::test_weights_are_those_of_an_independent_program[zero 1]",
        "pipeline/test_every_schedule.py",
    )
]


def session_command(where: Iterable[Path | str], marked: str) -> list[str]:
    """Return the command that every rank runs. where: paths, options. marked: which tests."""
    return [
        *(sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", *map(str, where)),
        *("-o", "timeout=0"),  # tests/equal/conftest.py has a limit that works inside MPI calls
        *("-p", "no:cacheprovider"),  # the ranks would write one cache at the same time
        *("-m", marked),
        # Not by file descriptor: the MPI library's last words before an abort must come through.
        *("--capture=sys", "-rs", "--no-fold-skipped", "--color=no"),
    ]


def count(summary: str, word: str) -> int:
    """Return the number in front of a word of pytest's last line, 0 where the word is missing."""
    match = re.search(rf"(\d+) {word}", summary)
    return int(match[1]) if match else 0


def check_session(
    num_ranks: int,
    *where: Path | str,
    test_limit: float = TEST_LIMIT,
    marked: str = QUICK,
):
    """Run one session; return (number passed, ["test - reason" of skips]); all else fails."""
    env = {"MPIPAR_TEST_LIMIT": str(test_limit)}
    result = run_ranks(num_ranks, session_command(where, marked), SESSION_LIMIT, env=env)
    assert result.returncode == 0, result.tail()
    lines = result.stdout.splitlines()
    summaries = [line for line in lines if re.fullmatch(r"=+ .* in [\d.]+s.* =+", line)]
    assert len(summaries) == 1, f"one summary expected, from rank 0\n{result.tail()}"
    bad = {word: count(summaries[0], word) for word in ("failed", "errors?", "xfailed", "xpassed")}
    assert not any(bad.values()), f"{bad}\n{result.tail()}"
    assert count(summaries[0], "passed") > 0, f"no test ran\n{result.tail()}"
    skipped = [x.removeprefix("SKIPPED ") for x in lines if x.startswith("SKIPPED ")]
    return count(summaries[0], "passed"), skipped


@pytest.mark.timeout(SESSION_LIMIT + 30)
@pytest.mark.parametrize(
    "num_ranks", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4, 8))]
)
def test_session(num_ranks, record_property):
    """Of 3 and 8 ranks it has the slow tests, too: a start takes as long as many tests."""
    marked = "not alone" if num_ranks in (3, 8) else QUICK
    but = [f"--ignore={path}" for path in CORE] if num_ranks == 4 else []
    record_session(record_property, *check_session(num_ranks, EQUAL, *but, marked=marked))


@pytest.mark.timeout(SESSION_LIMIT + 30)
@pytest.mark.parametrize("num_ranks", [4])
def test_core_session(num_ranks):
    """Not recorded: what a part of the files skips says nothing of the others."""
    check_session(num_ranks, *CORE)


@pytest.mark.slow
@pytest.mark.timeout(SESSION_LIMIT + 30)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_slow_session(num_ranks, record_property):
    """The rest of each product of layouts and schedules."""
    record_session(record_property, *check_session(num_ranks, EQUAL, marked="slow"))


def record_session(record_property, passed: int, skipped: list[str]) -> None:
    """Keep for the summary of a whole check what ran inside a session."""
    record_property("passed_inside", passed)
    for line in skipped:
        record_property("skipped_inside", line)


# The harness must catch these, each in a small session: file, text that the message must have.
BROKEN = {
    "one rank fails": (
        """
def test_a():
    if WORLD.Get_rank() == 1:
        raise ValueError("only here")
    WORLD.Barrier()
def test_b():
    WORLD.Barrier()
""",
        r"rank 1 of 2 failed(.|\n)*ValueError: only here",
    ),
    "ranks run different tests": (
        """
@pytest.mark.parametrize("number", [WORLD.Get_rank()])
def test_a(number):
    pass
""",
        r"ranks differ in the test they run",
    ),
    "a hang": (
        """
def test_a():
    if WORLD.Get_rank() == 1:
        WORLD.Recv(bytearray(1), source=0)
    WORLD.Barrier()
""",
        r"rank 1 of 2: 1.0 s in .*test_a(.|\n)*WORLD.Recv",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_harness_catches(case, tmp_path):
    text, message = BROKEN[case]
    shutil.copy(EQUAL / "conftest.py", tmp_path)
    head = "import pytest\nfrom mpi4py import MPI\nWORLD = MPI.COMM_WORLD\n"
    (tmp_path / "test_broken.py").write_text(head + text)
    with pytest.raises(AssertionError, match=message):
        check_session(2, tmp_path, test_limit=1.0 if case == "a hang" else TEST_LIMIT)
