"""What a sub-command is: an object of one form, `COMMAND` in a module of its own.

`cli.COMMANDS` names the modules. Each is imported only when the user has typed its name, and
before what was typed is read. So the module of a command that starts MPI imports what needs NumPy
when it runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mpipar.config.reading import ParsedConfig
from mpipar.config.sections import FIELDS
from mpipar.errors import UserError
from mpipar.job.session import Session

OF_A_RUN = frozenset({  # what matters only to many steps, their update and their run folder
    "steps", "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1",
    "beta2", "eps", "val_data", "eval_interval", "eval_tokens", "sample_interval", "progress",
    "tensorboard", "out", "run_name", "resume", "save_interval", "save_async", "keep_checkpoints",
    "log_interval", "trace", "trace_ops", "memory", "prompt", "sample_tokens", "temperature",
    "top_k", "top_p", "stop_token", "max_shard_size", "blas_arch"})
OF_A_STEP = frozenset(FIELDS) - OF_A_RUN


@dataclass(frozen=True)
class NoArguments:
    """The own arguments of a command that has none."""


@dataclass(frozen=True)
class Context:
    """What a command runs on.

    args: its own arguments. parsed: what the flags of a configuration and --config say.
    """

    session: Session | None  # None where flags are only read
    args: object
    parsed: ParsedConfig


@dataclass(frozen=True)
class Command:
    """One sub-command.

    run(context): does it and returns the exit code; raises UserError for what the user can put
    right. usage: its arguments in a line. arguments: the dataclass of its own arguments, each field
    a `setting`, `positional` or `switch`. fields: the settings of a configuration that it takes; it
    refuses the others. help_of: {setting: help in place of its own}. examples: for its help.

    needs_mpi: whether all ranks run it; else one process does. trains: whether it has steps that a
    signal can end, and takes --layout auto. is_free: whether words may stand between flags.
    problems(args): what is wrong with its own arguments, beside the values of each.
    """

    run: Callable[[Context], int]
    usage: str = "[flags]"
    arguments: type = NoArguments
    fields: frozenset[str] = frozenset()
    help_of: Mapping[str, str] = field(default_factory=dict)
    examples: str = ""
    needs_mpi: bool = False
    trains: bool = False
    is_free: bool = False
    problems: Callable[..., Iterable[UserError]] = lambda args: ()
