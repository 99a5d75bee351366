"""`mpipar train`: its flags, and what a run is made of."""

from dataclasses import dataclass

from mpipar.commands.command import Command, Context
from mpipar.config.sections import FIELDS
from mpipar.config.setting import setting
from mpipar.errors import EXIT_OK, DriftError, NonFiniteError


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
    """Train on all ranks, from flags to a trained model; return the exit code.

    Comm: that of every method of `Run`, in this order, and of `measured_step.show`.
    """
    # Late: these load NumPy.
    from mpipar.run.memory_limit import memory_limit
    from mpipar.run.training import Run
    from mpipar.study import measured_step, report
    from mpipar.study.explain.predict import predict
    from mpipar.study.plan.search import with_best_layout
    from mpipar.study.schedules import draw

    session, machine = context.session, context.args.machine
    training = Run(session)
    parsed = training.with_saved_settings(context.parsed)
    if training.start.config and not parsed.chooses_layout:
        machine = None  # saved settings are kept: there is nothing to choose
    parsed = session.agree(lambda: with_best_layout(parsed, training.world.size, machine))
    if not training.prepare(parsed, machine):
        return EXIT_OK
    config, barriers = training.config, ""
    with training.files:
        log = training.log
        training.describe(predict(config, training.grid.world_rank))
        if log.speaks:
            log(draw.one_step(training.schedule))
            started = report.environment(session)

        def write_report() -> None:
            if log.speaks:
                told = training.told | {
                    "environment": started,
                    "state": training.state,
                    "traced": training.tracer.written,
                    "barriers": barriers,
                }
                report.write(training.folder, config, told, log)

        with memory_limit(config, training.inputs.ops):
            training.allocate()
            with session.watch.follow_records(
                training.recorder, training.worker.comms, training.written_bytes
            ):
                with session.stop_on_request():
                    try:
                        training.loop()
                    except (NonFiniteError, DriftError):  # on all ranks of a step
                        training.flush()
                        training.state = f"failed in {session.where()} of {config.train.steps}"
                        write_report()
                        raise
                    if not training.stopped and training.last >= training.first:
                        barriers = measured_step.show(training)
                    training.save_last()
                code = training.finish()
                log()
                write_report()
                log(training.last_words)
                return code


EXAMPLES = """\
examples:
  mpipar train --steps 100
  mpiexec -n 4 mpipar train --layout dp=2,tp=2 --data text.txt --out runs/mine --trace 10:12
  mpiexec -n 4 mpipar train --resume auto --out runs/mine --steps 600
"""
COMMAND = Command(
    run,
    "[flags]",
    Arguments,
    fields=frozenset(FIELDS),
    examples=EXAMPLES,
    needs_mpi=True,
    trains=True,
    help_of={
        "layout": "short for --dp 2 --pp 2 --tp 2; auto: the axes with the shortest step that a"
        " data sheet predicts"
    },
)
