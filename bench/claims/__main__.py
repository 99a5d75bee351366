"""Textbook claims about partitioned training, one table each, on one model.

    python -m bench.claims barriers [--json FILE]         # barriers and bytes of a step, by layout
    python -m bench.claims memory [--json FILE]           # bytes per rank against dp, pp and tp
    python -m bench.claims cuts [--json FILE]             # barriers of one layer by its cut
    python -m bench.claims scaling [--json FILE]          # FLOPs and bytes of a rank against tp
    mpiexec -n 4 python -m bench.claims hybrids [--json FILE]   # how four workers spend their time
    mpiexec -n 4 python -m bench.claims sharing [--json FILE]   # recomputation, ZeRO: their price
    mpiexec -n 4 python -m bench.claims moe [--json FILE]       # experts by ep

Barriers and memory come from the shapes-only run, which tests prove equal to the records of real
runs. Hybrids, moe, and the times of sharing are real training steps.
"""

from __future__ import annotations

from bench.claims import computed, measured
from bench.claims.computed import MODEL
from bench.program import Outcome, Program

COMPUTED = {
    "barriers": computed.barriers,
    "memory": computed.memory,
    "cuts": computed.cuts,
    "scaling": computed.scaling,
}


def make_table(args, session) -> Outcome | int:
    """Measure or compute the table that the first word names."""
    if args.table in COMPUTED:
        rows = COMPUTED[args.table]()
    elif (rows := measured.TABLES[args.table](session.world)) is None:
        return 0
    plain = {"rows_per_step": 16, "microbatches": 8, **MODEL}
    facts = measured.EXPERTS if args.table == "moe" else plain
    return Outcome(rows, facts, variant=args.table)


main = Program(
    "claims",
    __doc__,
    make_table,
    together=lambda args: args.table in measured.TABLES,
    add=lambda parser: parser.add_argument("table", choices=(*COMPUTED, *measured.TABLES)),
).started(__name__)
