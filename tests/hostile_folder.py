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


KINDS = {  # what stands in the place of a file: plant it at a path
    "a link": lambda path, outside: path.symlink_to(outside),
    "a dangling link": lambda path, outside: path.symlink_to(path.parent.parent / "nowhere"),
    "a hard link": lambda path, outside: os.link(outside, path),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
}

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
