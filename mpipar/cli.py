"""The command line: reads it and runs the one sub-command that was asked for.

Only that command's module is imported, and only then, so that `mpipar schedule` never loads MPI,
and NumPy is loaded after the guard has set the number of BLAS threads.
"""

import argparse
import dataclasses
import importlib
import os

from mpipar import __version__, errors
from mpipar.commands.command import Command, Context
from mpipar.config.grid import AUTO
from mpipar.config.sections import in_force
from mpipar.config.setting import flag
from mpipar.errors import UsageError, combine, suggestion
from mpipar.run.files import settings
from mpipar.run.process import consistency, environment
from mpipar.run.process.session import Session

COMMANDS = {  # each is the COMMAND of the module mpipar.commands.NAME
    "train": "train a model on all ranks, in any layout dp x pp x cp x tp",
    "generate": "continue a text with a trained model",
    "verify": "prove a layout: compare one step with that of one rank, tensor by tensor",
    "data": "convert text files to token files, with their tokenizer; needs no MPI",
    "ckpt": "list, verify or export the checkpoints of a run; needs no MPI",
    "schedule": "show, prove and time a pipeline schedule; needs no MPI",
    "trace": "analyse a traced run: who waited for whom, where, how long; needs no MPI",
    "compare": "compare two traced runs: what got slower, and why; needs no MPI",
    "explain": "list every barrier of one rank's training step; needs no MPI",
    "plan": "choose a layout for a model, a machine and a number of devices; needs no MPI",
    "learn": "show worked examples with real numbers",
    "net": "measure the interconnect: latency, bandwidth, collectives, and who is slow",
    "doctor": "show MPI, launcher, ranks, hosts, cores, threads and GPUs",
}
EXIT_CODES = "\n".join(  # every --help ends with them
    ["exit codes:", *(f"  {code:>3}  {meaning}" for code, meaning in errors.EXIT_CODES.items())]
)
OVERVIEW = "\n".join(
    [
        "usage: mpipar COMMAND [flags]",
        "       mpiexec -n RANKS mpipar COMMAND [flags]",
        "",
        "commands:",
        *(f"  {name:<10}{text}" for name, text in COMMANDS.items()),
        "",
        "mpipar COMMAND --help lists the flags of a command.",
        "",
        EXIT_CODES,
    ]
)


def command_of(name: str) -> Command:
    """Return the command of this name. Raises UsageError if there is none."""
    if name not in COMMANDS:
        raise UsageError(
            f"{name!r}: unknown command{suggestion(name, list(COMMANDS))}; "
            f"use one of {', '.join(COMMANDS)}"
        )
    return importlib.import_module(f"mpipar.commands.{name}").COMMAND


def command_parser(name: str, every: bool = False) -> settings.Parser:
    """Return the parser of one command, whose messages carry the program's name.

    every: its help shows all flags, not only the common ones.
    """
    command = command_of(name)
    parser = settings.Parser(
        prog=f"mpipar {name}",
        usage=f"mpipar {name} {command.usage}",
        description=COMMANDS[name],
        epilog="\n".join(filter(None, [command.examples, EXIT_CODES])),
    )
    for field in dataclasses.fields(command.arguments):
        is_hidden = field.metadata["rare"] and not every
        settings.add_field(parser, field, **({"help": argparse.SUPPRESS} if is_hidden else {}))
    if command.fields and settings.add_flags(parser, command.fields, every, command.help_of):
        parser.epilog += f"\n\nmpipar {name} --help-all lists every flag."
    return parser


def context_of(session: Session | None, name: str, words: list[str]) -> Context:
    """Return what a command runs on, given these words. Raises UserError.

    Problems of a configuration stay in its ParsedConfig: `resolve` adds those found later.
    """
    command, parser = command_of(name), command_parser(name, "--help-all" in words)
    typed, problems = settings.parsed(parser, words)
    args = settings.read_arguments(command.arguments, typed, problems)
    # Without settings of a configuration, everything typed is the command's own arguments.
    parsed, found = settings.read(typed if command.fields else {}, problems, command.trains), []
    if parsed.problems and (args is None or not command.fields):
        found.append(UsageError(parsed.problems))
    if args is not None:
        found += command.problems(args)
    if found:
        raise combine(found)
    return Context(session, args, parsed)


def main(argv: list[str], session: Session) -> int:
    """Run one command; return its exit code. Raises UserError for what the user can fix."""
    name, *words = argv or ["help"]
    if name in ("-h", "--help", "help", "--version"):
        if session.launcher.rank == 0:
            print(f"mpipar {__version__}" if name == "--version" else OVERVIEW)
        return errors.EXIT_OK
    command = command_of(name)
    if not command.needs_mpi and session.launcher.rank > 0:
        return errors.EXIT_OK  # under a launcher only one process prints and writes the files
    if command.needs_mpi:
        session.facts = {"command": name} | consistency.versions()
        environment.choose_kernels(os.environ)
    session.will_loop = command.trains
    context = context_of(session, name, words)
    if context.parsed.prints:
        return _print_config(context)
    if command.needs_mpi and command.fields:
        run = context.parsed.config.run  # problems with its values are reported later
        session.watch.warn, session.watch.stop = run.hang_warn, run.hang_stop
        session.facts |= facts_of(context)
    return command.run(context)


def facts_of(context: Context) -> dict[str, str]:
    """Return a command's flags and kernels as facts, which must be identical on all ranks."""
    parsed = context.parsed
    found = {flag(name): value for name, value in in_force(parsed.config).items()}
    found |= vars(context.args) | {
        "--layout": AUTO if parsed.chooses_layout else None,
        environment.CORETYPE: os.environ.get(environment.CORETYPE),
    }
    if parsed.problems:
        found[consistency.REFUSED] = "; ".join(parsed.problems)
    return {name: "not given" if value is None else str(value) for name, value in found.items()}


def _print_config(context: Context) -> int:
    """Print the complete configuration for the ranks the launcher started; MPI is not loaded."""
    session, parsed = context.session, context.parsed
    resume = importlib.import_module("mpipar.run.resume")
    resolve = importlib.import_module("mpipar.run.resolve").resolve
    start = resume.find_start(parsed.config.run)
    parsed = resume.with_saved_settings(parsed, start, session.launcher.size)
    config, notes = resolve(parsed, session.launcher.size)
    if parsed.chooses_layout:
        notes.append("--layout auto: training chooses; this is the layout without it")
    if session.launcher.rank == 0:
        print("".join(f"# {note}\n" for note in notes) + settings.to_toml(config).rstrip())
    return errors.EXIT_OK
