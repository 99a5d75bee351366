"""What another user may leave in a run folder, and what a run writes there."""

import os

from one_rank import fresh
from simulated_ranks import workers_of
from state_cases import config_for, savers_of

from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.files import replace
from mpipar.run.trace import trace_file

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
