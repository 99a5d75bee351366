"""`mpipar train`: its flags, and what must happen before NumPy is loaded."""

from dataclasses import dataclass
from importlib import import_module

from mpipar.commands.blas_kernels import with_kernels
from mpipar.commands.command import Command, Context
from mpipar.config.sections import FIELDS
from mpipar.config.setting import setting


@dataclass(frozen=True)
class Arguments:
    """What belongs to one start of the program, and is not written to config.toml."""

    machine: str | None = setting(
        None,
        "cost model of bench.calibrate: --layout auto and --schedule auto choose by it,"
        " without measuring",
        metavar="FILE",
        rare=True,
    )


def run(context: Context) -> int:
    """Start the job, and train. Comm: that of `with_kernels` and of `training.run`."""
    session, args = context.session, context.args
    parsed = with_kernels(session, context.parsed)
    return import_module("mpipar.commands.training").run(session, parsed, args.machine)


COMMAND = Command(
    run,
    arguments=Arguments,
    fields=frozenset(FIELDS),
    needs_mpi=True,
    trains=True,
    help_of={
        "layout": "short for --dp 2 --pp 2 --tp 2; auto: the axes with the shortest predicted step,"
        " from costs measured at the start"
    },
)
