"""The form of a sub-command: an object `COMMAND` in a module of its own.

`cli.COMMANDS` names the modules. Each is imported only when the user has typed its name, before the
rest of the command line is parsed. The module of a command that starts MPI therefore imports what
needs NumPy only when it runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mpipar.config.sections import FIELDS
from mpipar.errors import UserError
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.process.session import Session

OF_A_RUN = frozenset(
    {  # what matters only to many steps, their updates and their run folder
        "steps",
        "min_lr_ratio",
        "warmup_steps",
        "lr_schedule",
        "weight_decay",
        "beta1",
        "beta2",
        "eps",
        "outer_lr",
        "outer_momentum",
        "val_data",
        "eval_interval",
        "eval_tokens",
        "tensorboard",
        "out",
        "resume",
        "save_interval",
        "save_async",
        "keep_checkpoints",
        "log_interval",
        "trace",
        "sample_tokens",
    }
)
OF_A_STEP = frozenset(FIELDS) - OF_A_RUN


@dataclass(frozen=True)
class Context:
    """What a command runs on.

    args: its own arguments. parsed: what the flags of a configuration and --config say.
    """

    session: Session | None  # None if flags are only parsed
    args: object
    parsed: ParsedConfig


@dataclass(frozen=True)
class Command:
    """One sub-command.

    run(context): runs it and returns the exit code; raises UserError for what the user can fix.
    usage: a summary of its arguments. arguments: the dataclass of its own arguments, each field
    a `setting`, `positional` or `switch`. fields: the settings of a configuration that it accepts;
    it refuses the others. help_of: {setting: help in place of its own}. examples: for its help.

    needs_mpi: whether all ranks run it, or only one process. trains: whether it has steps that a
    signal can end, and accepts --layout auto. problems(args): what is wrong with its own
    arguments, beyond the value of each.
    """

    run: Callable[[Context], int]
    usage: str
    arguments: type
    fields: frozenset[str] = frozenset()
    help_of: Mapping[str, str] = field(default_factory=dict)
    examples: str = ""
    needs_mpi: bool = False
    trains: bool = False
    problems: Callable[..., Iterable[UserError]] = lambda args: ()
