"""The sub-commands: reads the command line and hands over to the one module that was asked for.

Only that module is imported, and only then. So `mpipar schedule` never loads MPI, and NumPy is
loaded after the guard has set the number of BLAS threads.
"""

import argparse
import importlib

from mpipar import __version__, errors
from mpipar.config import flags
from mpipar.config.grid import AUTO
from mpipar.config.reading import Reading, read, to_toml
from mpipar.config.run import RunConfig
from mpipar.config.sections import FIELDS, settings
from mpipar.config.setting import flag
from mpipar.errors import UsageError, suggestion
from mpipar.job import alike
from mpipar.job.session import Session

COMMANDS = {
    "train": "train a model on all ranks, over any layout dp x pp x cp x tp",
    "generate": "continue a text with a trained model",
    "verify": "prove this layout: one step here against one rank, tensor by tensor",
    "data": "turn text files into files of tokens, with their tokenizer; needs no MPI",
    "ckpt": "list, verify or export the checkpoints of a run; needs no MPI",
    "schedule": "show, prove and time a pipeline schedule; needs no MPI",
    "trace": "show a traced run: who waited for whom, where, how long; needs no MPI",
    "compare": "compare two traced runs: what got slower, by cause; needs no MPI",
    "explain": "list every barrier of a training step of one rank; needs no MPI",
    "plan": "choose a layout for a model, a machine and a number of devices; needs no MPI",
    "learn": "worked examples with real numbers, and exercises that it checks",
    "doctor": "show MPI, launcher, ranks, hosts, cores, threads and GPUs",
}
USAGE = """\
usage: mpipar COMMAND [flags]
       mpiexec -n RANKS mpipar COMMAND [flags]
"""
OWN_ARGUMENTS = {  # commands without the flags of a configuration
    "ckpt": "mpipar ckpt ls|verify|export RUN [--step N] [--out FOLDER] [flags]",
    "data": "mpipar data prepare TEXT... --tokenizer WHAT --out FOLDER [--separator TEXT]",
    "trace": "mpipar trace RUN [--perfetto FILE] [--html FILE]",
    "compare": "mpipar compare RUN_A RUN_B [--machine FILE] [--check]",
    "plan": "mpipar plan MODEL --machine NAME --ranks N [flags]",
    "learn": "mpipar learn [EXAMPLE] | mpipar learn check [EXERCISE [ANSWER]] [--file FILE]",
}
WITHOUT_MPI = ("schedule", "explain", "ckpt", "data", "trace", "compare", "plan")
MACHINE = {  # what a command does with --machine
    "train": "--layout auto and --schedule auto choose by it, and measure nothing",
    "explain": "predict the time of a step; --schedule auto chooses by it",
}
WHOLE_RUN = {  # what matters only to many steps, their update and their run folder
    "steps", "min_lr_ratio", "warmup_steps", "lr_schedule", "decay_ratio", "weight_decay", "beta1",
    "beta2", "eps", "val_data", "eval_interval", "eval_tokens", "sample_interval", "progress",
    "tensorboard", "out", "run_name", "resume", "save_interval", "save_async", "keep_checkpoints",
    "log_interval", "trace", "trace_ops", "memory", "prompt", "sample_tokens", "temperature",
    "top_k", "top_p", "stop_token", "max_shard_size", "blas_arch"}
FLAGS_OF = {  # the flags of a configuration that a command uses; it refuses the others
    "train": set(FIELDS),
    "generate": {"prompt", "sample_tokens", "temperature", "top_k", "top_p", "stop_token", "seed",
                 "batch_size", "num_microbatches", "dp", "pp", "cp", "tp", "rank_order", "device",
                 "dtype", "kernels", "gemm", "tf32", "hang_warn", "hang_stop"},
    "verify": set(FIELDS) - WHOLE_RUN - {"clip", "memory_limit"},
    "explain": (set(FIELDS) - WHOLE_RUN | {"save_async"}) - {  # its copy of the state is predicted
        "hang_warn", "hang_stop", "lr", "data", "seed", "sync_sends", "check_comm", "loss_scale",
        "loss_scale_interval"},
}

HELP_OF = {  # where a flag says something else to a command
    "train": {
        "layout": "short for --dp 2 --pp 2 --tp 2; auto: the axes with the shortest predicted step,"
                  " from costs measured at the start"},
    "generate": {
        "prompt": "the text to continue (default 'The ')",
        "sample_tokens": "tokens to add to each prompt (default 200)",
        "seed": "fixes the draws, for every layout (default 0)",
        "batch_size": "prompts that are continued at the same time (default: 8 for each group and"
                      " dp copy)",
        "num_microbatches": "groups of prompts in the pipeline at the same time (default: pp)",
        "cp": "must be 1, because a text grows by one token at a time"},
}


def exit_codes() -> str:
    """The table that every --help ends with."""
    lines = [f"  {code:>3}  {meaning}" for code, meaning in errors.EXIT_CODES.items()]
    return "\n".join(["exit codes:", *lines])


def overview() -> str:
    """What `mpipar` and `mpipar --help` print."""
    commands = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join([USAGE, "commands:", *commands, "",
                      "mpipar COMMAND --help lists the flags of a command.", "", exit_codes()])


def command_parser(name: str, every: bool = False) -> flags.Parser:
    """The parser of one command, with the program's name in its messages.

    every: its help shows all flags, not only the usual ones.
    """
    if name == "schedule":
        subparsers = flags.Parser(prog="mpipar").add_subparsers()
        importlib.import_module("mpipar.commands.schedule").add_parser(subparsers)
        return subparsers.choices[name]
    parser = flags.Parser(prog=f"mpipar {name}", usage=f"mpipar {name} [flags]",
                          description=COMMANDS[name], epilog=exit_codes())
    if name == "generate":
        parser.usage = "mpipar generate RUN --prompt TEXT | --prompts FILE [flags]"
        parser.add_argument("run_folder", metavar="RUN", help="a run folder of mpipar train, a"
                            " folder of weights, or a checkpoint")
        parser.add_argument("--prompts", metavar="FILE", help="continue each line of a file, or"
                            " the prompt of each object of a .jsonl file; writes lines of JSON")
        parser.add_argument("--answers", metavar="FILE", help="where --prompts writes; must be new"
                            " (default: standard output)")
    elif name in OWN_ARGUMENTS:
        parser.usage = OWN_ARGUMENTS[name]
        importlib.import_module(f"mpipar.commands.{name}").add_arguments(parser)
    if name in FLAGS_OF and flags.add_flags(
            parser, FLAGS_OF[name], every, HELP_OF.get(name, {})):
        parser.epilog += f"\n\nmpipar {name} --help-all lists every flag."
    if name == "explain":
        importlib.import_module("mpipar.commands.explain").add_arguments(parser)
    if name in MACHINE:
        text = f"cost model of bench.calibrate: {MACHINE[name]}"
        parser.add_argument("--machine", metavar="FILE", help=text if name == "explain" or every
                            else argparse.SUPPRESS)
    if name == "train":
        text = "take the run folder over from a job that is gone, though nobody can tell that it is"
        parser.add_argument("--take-over", action="store_true",
                            help=text if every else argparse.SUPPRESS)
    return parser


def main(argv: list[str], session: Session) -> int:
    """Run one command; returns its exit code. Raises UserError for what the user can put right."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        _print_once(session, overview())
        return errors.EXIT_OK
    if argv[0] == "--version":
        _print_once(session, f"mpipar {__version__}")
        return errors.EXIT_OK
    name = argv[0]
    if name not in COMMANDS:
        raise UsageError(f"{name!r}: unknown command{suggestion(name, list(COMMANDS))}; "
                         f"use one of {', '.join(COMMANDS)}")
    if name not in WITHOUT_MPI:
        session.facts = {"command": name} | alike.versions()
    session.will_loop = name == "train"
    parser = command_parser(name, "--help-all" in argv)
    # Text files, or the words of an answer, may stand before, between and behind the flags.
    parse = (parser.parse_known_intermixed_args if name in ("data", "learn")
             else parser.parse_known_args)
    args, extras = parse(flags.join_negative(parser, argv[1:]))
    unknown = flags.unknown_flags(parser, extras)
    reading = read(args, unknown, may_choose=name == "train")
    if getattr(args, "print_config", False):
        return _print_config(reading, session)
    if name in WITHOUT_MPI and session.launcher.rank > 0:
        return errors.EXIT_OK  # under a launcher one process prints, and writes the files
    if session.facts and name in FLAGS_OF:
        run = reading.config.run  # what is wrong with its values is said later
        session.watch.warn, session.watch.stop = run.hang_warn, run.hang_stop
        session.facts |= facts_of(reading, args)
    if name == "train":  # before the module, which imports NumPy
        reading = importlib.import_module("mpipar.commands.loops").with_loops(session, reading)
    module = importlib.import_module(f"mpipar.commands.{name}")
    if name == "data":
        return module.run(session, args, unknown)
    if name in ("schedule", "doctor", *OWN_ARGUMENTS):
        if unknown:
            raise UsageError(unknown)
        if name == "learn":
            return module.run(session, args)
        return module.run(session if name == "doctor" else args)
    if name == "explain":
        return module.run(reading, args)
    if name == "generate":
        return module.run(session, reading, args)
    if name == "train":
        session.take_over = args.take_over
        return module.run(session, reading, args.machine)
    return module.run(session, reading)


def facts_of(reading: Reading, args: argparse.Namespace) -> dict[str, str]:
    """What the flags of a command say, which must be the same on all ranks."""
    found = {flag(field.name): "not given" if value is None else str(value)
             for _, field, value in settings(reading.config)}
    own = ("run_folder", "machine", "take_over", "prompts", "answers")
    found |= {name: str(getattr(args, name)) for name in own if hasattr(args, name)}
    if reading.chooses_layout:
        found["--layout"] = AUTO
    if reading.problems:
        found[alike.REFUSED] = "; ".join(reading.problems)
    return found


def _print_config(reading: Reading, session: Session) -> int:
    """The complete configuration for the ranks that the launcher has started; MPI stays off."""
    resolve = importlib.import_module("mpipar.commands.resolve").resolve
    if reading.config.run.resume != RunConfig.resume:
        resume = importlib.import_module("mpipar.commands.resume")
        start = resume.find_start(reading.config.run)
        reading = resume.with_saved_settings(reading, start, session.launcher.size)
    config, notes = resolve(reading, session.launcher.size)
    if reading.chooses_layout:
        notes.append("--layout auto: training measures and chooses; this is the layout without it")
    _print_once(session, "".join(f"# {note}\n" for note in notes) + to_toml(config).rstrip())
    return errors.EXIT_OK


def _print_once(session: Session, text: str) -> None:
    if session.launcher.rank == 0:
        print(text)
