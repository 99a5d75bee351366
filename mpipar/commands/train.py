"""`mpipar train`: its flags."""

from dataclasses import dataclass
from importlib import import_module

from mpipar.commands.command import Command, Context
from mpipar.config.sections import FIELDS
from mpipar.config.setting import setting


@dataclass(frozen=True)
class Arguments:
    """What belongs to one start of the program, and is not written to config.toml."""

    machine: str | None = setting(
        None,
        "--layout auto chooses by this machine: a name that plan knows, or a file of this form"
        " (default: cpu, and h100 with --device cuda)",
        metavar="NAME|FILE",
        rare=True,
    )


def run(context: Context) -> int:
    """Start the job, and train. Comm: that of `training.run`."""
    training = import_module("mpipar.run.training")  # late: it loads NumPy
    return training.run(context.session, context.parsed, context.args.machine)


EXAMPLES = """\
examples:
  mpipar train --steps 100
  mpiexec -n 4 mpipar train --layout dp=2,tp=2 --data text.txt --out runs/mine --trace 10:12
  mpiexec -n 4 mpipar train --resume auto --out runs/mine --steps 600
"""
COMMAND = Command(
    run,
    arguments=Arguments,
    fields=frozenset(FIELDS),
    examples=EXAMPLES,
    needs_mpi=True,
    trains=True,
    help_of={
        "layout": "short for --dp 2 --pp 2 --tp 2; auto: the axes with the shortest step that a"
        " data sheet predicts"
    },
)
