"""Runs the commands that a page shows from top to bottom, in one empty folder per page."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np

from bench import results
from bench.results import ROOT
from docs.build.blocks import Block
from mpipar import cli
from mpipar.comm.launcher import Launcher
from mpipar.errors import DataError, UserError
from mpipar.interconnect.program import environment_of_jobs
from mpipar.run.process.session import Session

LIMIT = 100  # seconds for one command
FILE = re.compile(r"^```\w+ ([\w-]+\.\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"[|<>;*$&]")  # what only a shell understands
# The only variables that programs see, so that output depends on nothing else.
SETTINGS = {
    "COLUMNS": "80",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": str(ROOT),
    "NO_COLOR": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


# Tests run pages beside each other, so ranks give their cores away; what is measured is as a user
# gets it.
PATIENT = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


class Workplace:
    """The folder in which the commands of one page run, and what they have printed.

    page: its text. A fence with a file's name, as in ```python my_row.py, becomes a file there.
    settings: more variables that programs see.
    """

    def __init__(self, page: str = "", settings: Mapping[str, str] = PATIENT):
        self.page, self.place, self.settings = page, None, SETTINGS | settings
        self.outputs: dict[str, tuple[int, str]] = {}

    def run(self, command: str) -> tuple[int, str]:
        """Return (exit code, output) of a command; a command that a page repeats runs only once."""
        if command not in self.outputs:
            self.outputs[command] = execute(command, self.folder(), self.settings)
        return self.outputs[command]

    def folder(self) -> Path:
        """Return the folder, which is created when the first command needs it."""
        if self.place is None:
            self.place = tempfile.TemporaryDirectory(prefix="mpipar-page-")
            for name, text in FILE.findall(self.page):
                (Path(self.place.name) / name).write_text(text, encoding="utf-8")
        return Path(self.place.name)

    def close(self) -> None:
        """Remove the folder."""
        if self.place is not None:
            self.place.cleanup()


def typed(page: str) -> list[str]:
    """Return a page's commands in order: lines of its ```bash fences, except ```bash not-run."""
    lines = [
        line for block in TYPED.findall(page) for line in re.sub(r"\\\n\s*", "", block).splitlines()
    ]
    commands = (re.split(r"(?:^|\s+)#", line)[0].strip() for line in lines)
    return [command for command in commands if command]


def execute(command: str, folder: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    """Run a command line in a folder and return (exit code, output); `&&` joins several.

    Commands of mpipar that need no MPI run in this process, which takes a tenth of the time.
    """
    output, code = [], 0
    for one in command.split(" && "):
        words = shlex.split(one)
        inside = (
            words[0] == "mpipar"
            and not SHELL.search(one)
            and words[1] in cli.COMMANDS
            and (not cli.command_of(words[1]).needs_mpi)
        )
        found = run_inside(words[1:], folder, settings) if inside else None
        code, text = found or run_outside(one, folder, settings)
        output.append(text)
        if code:
            break
    return code, "".join(output).replace(f"{folder}/", "")


def run_inside(
    words: list[str], folder: Path, settings: Mapping[str, str]
) -> tuple[int, str] | None:
    """Run like `execute`, in this process; None if the program exits with an error of its own.

    The error is then left to a process, which prints it.
    """
    text = io.StringIO()
    try:
        with (
            mock.patch.dict(os.environ, settings),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(text),
        ):
            return cli.main(words, Session(Launcher("none", 0, 1, 0, 1))), text.getvalue()
    except UserError:
        return None
    except SystemExit as leaving:  # argparse, after --help
        return int(leaving.code or 0), text.getvalue()


def run_outside(command: str, folder: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    """Run like `execute`, in a shell and separate processes."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {
        key: value for key, value in environment_of_jobs().items() if not key.startswith("PYTEST_")
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        check=False,
        text=True,
        env={**kept, **settings, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
    )
    return done.returncode, done.stdout


def passing_words() -> list[str]:
    """Return words that depend on this host or today's date: no page may show them."""
    return [
        socket.gethostname(),
        str(ROOT),
        platform.python_version(),
        np.__version__,
        os.path.expanduser("~/"),
        "/tmp/",  # noqa: S108
        time.strftime("%Y-%m-%d"),
    ]


def shown(block: Block, workplace: Workplace) -> str:
    """Return the command of a `run` block and what it prints. Raises PageError."""
    code, text = workplace.run(block.words)
    expected = int(block.options.get("exit", 0))
    if code != expected:
        raise block.problem(f"exit code {code}, not {expected}\n{text}")
    for word in passing_words():
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text):
            raise block.problem(f"prints {word}, which changes from host to host: use `measured`")
    return console(block, block.words, text)


def console(block: Block, command: str, output: str, info: str = "bash") -> str:
    """Return a fence with the command, and one with its output or the selected part of it."""
    text = "\n".join(line.rstrip() for line in block.part(output.rstrip().splitlines()))
    output = f"```text\n{text}\n```"
    return output if "output" in block.options else f"```{info}\n{command}\n```\n\n{output}"


BENCH = "docs.build measure"
LINE = re.compile(r"(mpipar/[\w/]+\.py):\d+")  # wrong after the next change above it


def measure(path: Path, commands: list[str]) -> None:
    """Run the commands, and write their outputs. Raises DataError if one of them fails."""
    rows = []
    if not (commands or path.exists()):
        raise DataError(f"{path}: does not exist; name the commands to measure")
    with contextlib.closing(Workplace(settings={})) as workplace:
        for command in commands or [row["command"] for row in rows_of(path)]:
            start = time.perf_counter()
            code, output = workplace.run(command)
            if code:
                raise DataError(f"{command}: exit code {code}\n{output}")
            seconds = round(time.perf_counter() - start, 1)
            rows.append({"command": command, "seconds": seconds, "output": lasting(output)})
    results.write(str(path), BENCH, rows)


def lasting(output: str) -> str:
    """Return the output without line numbers, and with `host` for this machine's name.

    Columns keep their places.
    """

    def host(found: re.Match) -> str:
        return "host".ljust(len(found[0])) if len(found[1]) > 1 else f"host{found[1]}"

    output = LINE.sub(lambda found: found[1].ljust(len(found[0])), output)
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])( *)", host, output)


def rows_of(path: Path) -> list[dict]:
    """Return the commands of a file with their seconds and outputs. Raises DataError."""
    return results.read(path, BENCH)["rows"]


def shown_measured(block: Block, root: Path) -> str:
    """Return the machine, and the commands and outputs of a file, or `:: part N` of them."""
    result = results.read(block.file(root, block.words), BENCH)
    rows, machine = result["rows"], result["machine"]
    if "part" in block.options:
        rows = [rows[int(block.options["part"]) - 1]]
    parts = [console(block, row["command"], row["output"], "bash not-run") for row in rows]
    facts = f"{machine['date']}, {machine['cores']} cores, {machine['cpu']}"
    return "\n\n".join([*parts, f"Measured: {facts}."])
