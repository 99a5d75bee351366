"""What another user may leave in a run folder, what a run writes there, and that other user."""

import os
import traceback

import pytest
from one_rank import fresh
from simulated_ranks import workers_of
from state_cases import config_for, savers_of

from mpipar.checkpoint import weights as checkpoint
from mpipar.errors import DataError, OutputError, UsageError
from mpipar.files import replace
from mpipar.trace import trace_file

NOBODY = 65534


def plant(kind, path, outside):
    """Put something into the place of a file."""
    if kind == "a link":
        path.symlink_to(outside)
    elif kind == "a dangling link":
        path.symlink_to(path.parent.parent / "nowhere")
    elif kind == "a loop":
        path.symlink_to(path.name)
    elif kind == "a hard link":
        os.link(outside, path)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        assert kind == "a device"
        path.symlink_to("/dev/zero")


KINDS = ["a link", "a dangling link", "a loop", "a hard link", "a pipe", "a folder", "a device"]

WRITERS = {
    "trace": lambda run: trace_file.write_meta(run, {}),
    "weights": lambda run: checkpoint.save(fresh(), run / "weights"),
    "hang": lambda run: replace.replace_file("hang/rank-00000.json", [b"{}"], root=run),
    "checkpoints": lambda run: savers_of(workers_of(config_for(), 1), run / "checkpoints")[0].save(
        1
    ),
}


def as_nobody(function, *arguments):
    """What a function says in a process of an unprivileged user: its result or its error."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = repr(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the answer
            said = f"{type(error).__name__}: {error}"
            if not isinstance(error, OSError | OutputError | DataError | UsageError):
                said += traceback.format_exc()
        os.write(write, said.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said
