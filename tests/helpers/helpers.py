"""Helpers of several tests: closeness, commands with a hard time limit, commands under mpiexec."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# More ranks than cores run, beside other tests: a waiting rank must yield its core, and one thread
# per rank is enough. A rank that waits a second for another takes 1.0 s of processor time with a
# plain yield, and 0.2 s with the heavy one, which sleeps (8 ranks on 2 cores).
# Variables of the library that is not in use do no harm.
OVERSUBSCRIBED = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "HYDRA_LAUNCHER": "fork",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
MARK = "MPIPAR_TEST_MARK"  # a variable by which every process of one command can be found again


def assert_close(actual, expected, tol: float, name: str, largest: float = 0.0) -> None:
    """Assert max|a-b| <= tol * max(max|b|, 1e-3 * largest), naming the tensor and the worst place.

    ``largest`` is the largest absolute value over all tensors of this kind (gradients, weights) of
    the model. A tensor that is mathematically zero holds noise, which cannot serve as its own
    scale. NaN in either array fails.
    """
    actual = np.asarray(actual)
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} != {expected.shape}"
    if actual.size == 0:
        return
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    worst = np.unravel_index(int(np.argmax(difference)), difference.shape)  # argmax finds NaN first
    bound = tol * max(float(np.max(np.abs(expected))), 1e-3 * largest)
    assert difference[worst] <= bound, (
        f"{name}: difference {difference[worst]:.3e} > {bound:.3e} at {tuple(map(int, worst))}: "
        f"{actual[worst]!r} against {expected[worst]!r}"
    )


def assert_all_close(actual: Mapping, expected: Mapping, tol: float) -> None:
    """Assert closeness of every tensor of a model, by name; the names have to be the same."""
    assert set(actual) == set(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    assert expected, "no tensors to compare"
    largest = max(float(np.max(np.abs(x))) for x in expected.values() if np.size(x))
    for name in sorted(expected):
        assert_close(actual[name], expected[name], tol, name, largest)


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended: exit code (negative: ended by that signal), output, seconds."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def ended(self, code: int = 0) -> "Finished":
        """Return this command, which must have ended with this exit code."""
        assert self.returncode == code, self.tail()
        return self

    def tail(self, lines: int = 150) -> str:
        """Return the command, its exit code and the end of both streams, for a failing test."""
        parts = [f"$ {' '.join(self.argv)}", f"exit {self.returncode} after {self.seconds:.1f} s"]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            parts += [f"--- end of {name}", *text.splitlines()[-lines:]]
        return "\n".join(parts)


def find_launcher() -> str | None:
    """Return the mpiexec of the environment that runs the tests, else of the PATH, else None."""
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else shutil.which("mpiexec")


def launcher() -> str:
    """Return the mpiexec that starts ranks; a test is skipped where there is none."""
    found = find_launcher()
    if found is None:
        pytest.skip("no mpiexec: install .[mpich]")
    return found


def processes_with(variable: str, value: str) -> list[int]:
    """Return the ids of the running processes that were started with this environment variable."""
    entry = f"{variable}={value}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended in the meantime, or another user's
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def kill_with(variable: str, value: str, sign: int = signal.SIGKILL) -> None:
    """Signal every process started with this environment variable, whatever group it is in."""
    for pid in processes_with(variable, value):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


@contextlib.contextmanager
def started(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    stdout=None,
    stderr=None,
) -> Iterator[tuple[subprocess.Popen, str]]:
    """A command's process and its mark; at the end all its processes are killed.

    Sources are compiled once, whatever the caller's setting: hundreds of programs start. One may
    start a pytest of its own, which must not get the options of this one.
    """
    mark = uuid.uuid4().hex
    left_out = ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
    inherited = {key: value for key, value in os.environ.items() if key not in left_out}
    process = subprocess.Popen(
        argv,
        env={**inherited, **env, MARK: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        kill_with(MARK, mark)
        process.wait()


def run_command(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Finished:
    """Run a command to its end; past ``timeout`` seconds it is killed whole and the test fails.

    Processes that outlive the command are killed; they fail the test as well.
    """
    argv, late, left = tuple(map(str, argv)), False, []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        with started(argv, env or {}, cwd or REPOSITORY, out, err) as (process, mark):
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                late = True
            seconds = time.monotonic() - start
            if not late:
                left = wait_for_end(mark)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    result = Finished(argv, process.returncode, *texts, seconds)
    assert not late, f"still running after {timeout} s, killed\n{result.tail()}"
    assert not left, f"processes {left} outlived the command\n{result.tail()}"
    return result


def wait_for_end(mark: str, limit: float = 20.0) -> list[int]:
    """Wait until no marked process is left; return those still there after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while (left := processes_with(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def run_ranks(
    num_ranks: int,
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Finished:
    """Run ``mpiexec -n num_ranks argv`` like run_command, set for more ranks than cores."""
    return run_command(
        [launcher(), "-n", str(num_ranks), *argv],
        timeout,
        env={**OVERSUBSCRIBED, **(env or {})},
        cwd=cwd,
    )
