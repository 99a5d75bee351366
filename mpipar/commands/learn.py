"""`mpipar learn`: worked examples of partitioned layers, with real numbers on real ranks."""

from dataclasses import dataclass
from importlib import import_module

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional
from mpipar.config.text import shown
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError, suggestion

EXAMPLES = """\
examples:
  mpipar learn                              lists the worked examples
  mpiexec -n 2 mpipar learn ffn             shows one on 2 ranks
"""


@dataclass(frozen=True)
class Arguments:
    """Which example is shown."""

    topic: str | None = positional(
        "EXAMPLE", "the worked example that is shown (default: all are listed)", default=None
    )


def run(context: Context) -> int:
    """Print the list or an example; return the exit code. Comm: the barriers of the example."""
    catalog = import_module("mpipar.study.examples.catalog")  # late: it loads NumPy
    session, name, known = context.session, context.args.topic, catalog.EXAMPLES
    # What ranks compare once MPI starts. Until then each process reports its own errors.
    facts, session.facts = session.facts, {}
    size = session.launcher.size
    if name is None:
        if session.launcher.rank == 0:
            for topic, one in known.items():
                print(f"{topic:<11} {one.title} (tour {one.chapter})")
            print("\nmpiexec -n 2 mpipar learn ffn shows the worked example ffn.")
        return EXIT_OK
    if name not in known:
        raise UsageError(
            f"{shown(name)}: no such example{suggestion(name, list(known))}; use one of"
            f" {', '.join(known)}"
        )
    if size not in (legal := known[name].ranks):
        raise UsageError(
            f"{name} needs {' or '.join(map(str, legal))} ranks, but {size}"
            f" {'was' if size == 1 else 'were'} started: type mpiexec -n {legal[0]} mpipar"
            f" learn {name}"
        )
    session.facts = facts | {"example": name}
    lines, off = catalog.run(name, session.start())
    if lines:
        print("\n".join(lines))
    return EXIT_OK if off <= catalog.TOLERANCE else EXIT_CHECK_FAILED


COMMAND = Command(run, "[EXAMPLE]", Arguments, examples=EXAMPLES, needs_mpi=True)
