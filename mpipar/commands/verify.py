"""`mpipar verify`: proves a layout on this machine by comparing a float64 step with one rank's."""

from dataclasses import dataclass, replace

from mpipar.commands.command import OF_A_STEP, Command, Context
from mpipar.config.sections import FIELDS
from mpipar.config.setting import field_problem, switch
from mpipar.config.text import counted
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.run.files.settings import forced

WORST = 5  # tensors that are shown without --all


@dataclass(frozen=True)
class Arguments:
    """How much is shown."""

    all: bool = switch("show the largest difference of every tensor, not of the worst five")


def run(context: Context) -> int:
    """Print whether all tensors agree, and the worst of them; return 0 if they do, else 1.

    dtype and optimizer are float64 and plain SGD, whatever the flags say: float32 would hide a
    small error in its rounding, and Adam would hide a wrong scale.
    Comm: that of `compare_inputs`; one training step and two streams of tensors to world rank 0.
    """
    from mpipar.run import verify
    from mpipar.run.console.tables import layout_text, table
    from mpipar.run.resolve import Inputs, compare_inputs

    session, parsed = context.session, context.parsed
    world = session.start()
    inputs = session.agree(lambda: Inputs(exact(parsed), world.size, session.host_rank))
    compare_inputs(session, inputs)
    grid = inputs.config.grid
    found = verify.compare_with_one_rank(
        inputs.config, inputs.train_part, world, host_rank=session.host_rank
    )
    bad = sum(not one.ok for one in found)
    if world.rank == 0:
        print(
            f"{len(found) - bad} of {len(found)} agree to {verify.TOLERANCE:g} of their"
            f" largest entry{f'; {bad} DIFFER' if bad else ''}"
        )
        print(
            f"{layout_text(grid)}, schedule {grid.schedule_csv or grid.schedule},"
            f" {counted(grid.num_microbatches, 'microbatch')},"
            " against one rank and one microbatch; in float64, whatever --dtype says"
        )
        print("\n".join([*inputs.notes, ""]))
        worst = sorted(found, key=lambda one: (one.ok, -one.error))[:WORST]
        rows = [
            (one.name, one.kind, f"{one.error:.1e}", one.where, "ok" if one.ok else "DIFFERS")
            for one in (found if context.args.all else worst)
        ]
        print(table([("tensor", "of the step", "largest difference", "at", ""), *rows], left=2))
        if len(rows) < len(found):
            print(f"the worst {len(rows)} of {len(found)}; --all shows all")
    # Only world rank 0 knows the result; the highest exit code becomes that of all ranks.
    return EXIT_CHECK_FAILED if bad else EXIT_OK


def exact(parsed):
    """Return the configuration with float64 and SGD, whatever flags or preset say.

    A value that is none stays, to be refused.
    """

    def with_values(part, **values):
        legal = [one for one in values if not field_problem(FIELDS[one], getattr(part, one))]
        return replace(part, **{name: values[name] for name in legal})

    run = with_values(parsed.config.run, dtype="float64", loss_scale=None, gemm="blas")
    train = with_values(parsed.config.train, optimizer="sgd")
    return forced(parsed, replace(parsed.config, run=run, train=train))


COMMAND = Command(
    run,
    "[flags]",
    Arguments,
    fields=OF_A_STEP - {"clip", "memory_limit", "islands", "outer_interval"},
    needs_mpi=True,
)
