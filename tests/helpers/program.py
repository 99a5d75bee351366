"""Starts the program as a user does, and reads the files that it writes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from helpers import (
    MARK,
    OVERSUBSCRIBED,
    REPOSITORY,
    Finished,
    launcher,
    processes_with,
    run_command,
    run_ranks,
    started,
    wait_for_end,
)
from safetensors.numpy import load_file

PROGRAM = (sys.executable, "-m", "mpipar")
FAULTY = (sys.executable, str(REPOSITORY / "tests" / "helpers" / "faulty_run.py"))
LIMIT = 200.0  # seconds for one command: much more than it takes, for a machine under load
BLOCK = "mpipar: stopped, exit code "
# A short text. A run reads all of its held-out part; of the default text that takes seconds.
TEXT = ("--data", str(REPOSITORY / "LICENSE"))
LETTERS = "a short text, again and again. " * 30


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every start of the program: this source, one thread per rank."""
    return {**OVERSUBSCRIBED, "PYTHONPATH": str(REPOSITORY), **(env or {})}


def mpipar(
    *words,
    ranks: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
) -> Finished:
    """Run a command to its end, under mpiexec, or without a launcher where ``ranks`` is None."""
    argv = [*PROGRAM, *map(str, words)]
    if ranks is None:
        return run_command(argv, LIMIT, environment(env), cwd)
    return run_ranks(ranks, argv, LIMIT, environment(env), cwd)


def pair(first: Sequence, second: Sequence, folders: Sequence[Path]) -> Finished:
    """Run two ranks of one job with words and working folders of their own."""
    rank, other = (
        ["-n", "1", "-wdir", str(folder), *PROGRAM, *map(str, words)]
        for words, folder in zip((first, second), folders, strict=True)
    )
    return run_command([launcher(), *rank, ":", *other], LIMIT, environment())


class Job:
    """A running command: its process, and its output so far."""

    def __init__(self, process: subprocess.Popen, mark: str, path: Path):
        self.process, self.mark, self.path = process, mark, path

    def output(self) -> str:
        return self.path.read_text()

    def wait_until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not reached():
            assert time.monotonic() < deadline, self.output()
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)

    def a_rank(self) -> int:
        """Return the id of a rank's process: ranks start after their launcher."""
        return max(processes_with(MARK, self.mark))

    def end(self, limit: float = LIMIT) -> int:
        """Return the exit code of a command that has to end with all its processes."""
        start = time.monotonic()
        code = self.process.wait(LIMIT)
        assert wait_for_end(self.mark) == []
        assert time.monotonic() - start < limit, self.output()
        return code

    def interrupt(self, sign: int = signal.SIGINT, limit: float = LIMIT) -> int:
        """Send a signal to the process that was started; return the exit code, see `end`."""
        os.kill(self.process.pid, sign)
        return self.end(limit)


@contextlib.contextmanager
def running(argv: Sequence, folder: Path, ranks: int = 1) -> Iterator[Job]:
    """A command in the background, in this folder; at the end all its processes are killed."""
    path = folder / "output.txt"
    command = [*([launcher(), "-n", str(ranks)] if ranks > 1 else []), *map(str, argv)]
    with path.open("w") as file, started(command, environment(), folder, file, file) as job:
        yield Job(*job, path)


def layout_flags(layout: tuple[int, int, int]) -> list[str]:
    """Return dp, pp and tp as flags."""
    return [word for axis, n in zip(("dp", "pp", "tp"), layout, strict=True)
            for word in (f"--{axis}", str(n))]  # fmt: skip


def metrics(folder: Path) -> list[dict]:
    """Return the objects of metrics.jsonl; NaN and Infinity are not JSON and are refused."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON number")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors that a run has written."""
    return load_file(folder / "weights" / "model.safetensors")


def one_block(result: Finished) -> tuple[int, str]:
    """Return the job's exit code, which the only error block names too, and the block."""
    blocks = result.stderr.split(BLOCK)[1:]
    assert len(blocks) == 1, f"{len(blocks)} error blocks\n{result.tail()}"
    code = int(blocks[0].split()[0])
    assert result.returncode == code, result.tail()
    return code, blocks[0]


def block_of(result: Finished, code: int, *parts: str) -> str:
    """Return the only error block of a job that must have this exit code, with all the parts."""
    found, block = one_block(result)
    assert found == code, result.tail()
    missing = [part for part in parts if part not in block]
    assert not missing, f"{missing} in\n{result.tail()}"
    return block


def killed_by(result: Finished, sign: int) -> Finished:
    """Return a command whose rank a signal has killed: its launcher ends it and says so.

    The exit code is the signal's number from Hydra, 128 more from Open MPI's mpirun.
    """
    assert result.returncode in (-sign, sign, 128 + sign), result.tail()
    said = result.returncode < 0 or f"signal {sign}" in result.stdout + result.stderr
    assert said, result.tail()
    return result


def section(text: str, title: str) -> list[str]:
    """Return the lines of the console below one that starts with ``title``, up to an empty one.

    Any number of blanks in the line equals any other in the title: columns have no fixed width.
    """
    lines, title = text.split("\n"), " ".join(title.split())
    found = [i for i, line in enumerate(lines) if " ".join(line.split()).startswith(title)]
    assert len(found) == 1, f"{title!r} stands {len(found)} times in\n{text}"
    below = lines[found[0] + 1 :]
    return below[: below.index("")] if "" in below else below


def cells(line: str) -> list[str]:
    """Return the cells of a table's row: columns are two or more blanks apart."""
    return re.split(r"\s{2,}", line.strip())


def flip(path, share=0.5):
    """Change one bit at this share of a file's length: the lowest of the first of two bytes."""
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1)) & ~1] ^= 1
    path.write_bytes(content)
