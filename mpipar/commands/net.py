"""`mpipar net`: measure the interconnect, through the calls of training and through bare mpi4py."""

from importlib import import_module

from mpipar.commands.command import Command, Context
from mpipar.interconnect.arguments import Arguments, problems

EXAMPLES = """\
examples:
  mpiexec -n 2 mpipar net --quick                      every case at three sizes
  mpiexec -n 4 mpipar net all-reduce -b 8 -e 1M -n 100 --via comm,mpi4py,c
  mpiexec -n 8 mpipar net all-reduce --layout dp=2,pp=2,tp=2
  mpipar net latency all-reduce --launches 5 --start "mpiexec -n 2" --json before.jsonl
  mpipar net compare before.jsonl after.jsonl          exit code 1 if something is slower
  mpiexec -n 8 mpipar net vet                          names slow hosts and links
"""


def run(context: Context) -> int:
    """Measure, vet, show or compare; return the exit code. Comm: all of the benchmark's."""
    program = import_module("mpipar.interconnect.program")  # late: it loads NumPy
    return program.run(context.session, context.args)


COMMAND = Command(
    run,
    "[CASE ...] [flags]",
    Arguments,
    examples=EXAMPLES,
    needs_mpi=True,
    problems=problems,
)
