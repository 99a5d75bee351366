"""Tables of the planted bugs: what each does to a run, and which check detects it.

mpiexec -n 2 python -m tests.helpers.twins shipped [--json FILE]  # published bugs, who sees them
mpiexec -n 2 python -m tests.helpers.twins curves [--json FILE]  # loss curves of bugs of experts
"""

from bench.program import Outcome, Program
from tests.helpers.twins import shipped

TABLES = {"shipped": shipped.shipped, "curves": shipped.curves}


def measure(args, session) -> Outcome | int:
    """Measure the table that the first word names. Comm: training steps on all ranks."""
    rows = TABLES[args.table](session.world)
    if rows is None:
        return 0
    return Outcome(rows, shipped.MODEL | shipped.TRAINING, variant=args.table)


main = Program(
    "tests.helpers.twins",
    __doc__,
    measure,
    together=True,
    add=lambda parser: parser.add_argument("table", choices=tuple(TABLES)),
).started(__name__)
