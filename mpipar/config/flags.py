"""The command line of a configuration: one flag per field."""

import argparse
import dataclasses
import os
import types
from dataclasses import MISSING, dataclass

from mpipar.comm.launcher import read_launcher
from mpipar.config.names import EXAMPLES, RENAMED, unknown_word
from mpipar.config.sections import FIELDS, FLAGS, SECTIONS
from mpipar.config.setting import flag, kind, setting, switch
from mpipar.config.text import brief
from mpipar.errors import UsageError

MANY = 28  # flags; a command with more of them shows only the common ones
MOST_CHOICES = 8  # that are listed after a flag
FORMS = {int: "N", float: "X", str: "TEXT"}  # placeholders for values in the help
OF_PATHS = {"nargs": "+", "metavar": "PATH"}
USUAL = (  # (title, description, fields) that --help shows; --help-all shows the others too
    ("input and output", "", ("preset", "config", "data", "out", "resume")),
    ("layout", "dp x pp x cp x tp = number of ranks", ("layout", "dp", "pp", "cp", "tp")),
    ("pipeline", "", ("schedule", "num_microbatches")),
    ("shape of the model", "", ("layers", "d_model", "heads", "seq_len")),
    ("update", "", ("steps", "batch_size", "lr", "seed")),
    ("machine and measurement", "", ("dtype", "device", "trace")),
)


@dataclass(frozen=True)
class Typed:
    """Flags that are not settings."""

    layout: str | None = setting(None, "short for --dp 2 --pp 2 --tp 2", metavar="dp=2,pp=2,tp=2")
    config: str | None = setting(
        None, "read these keys first; flags override them", metavar="FILE.toml"
    )
    print_config: bool = switch("print the resulting configuration as TOML and exit")


MORE = {one.name: one for one in dataclasses.fields(Typed)}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and without its own exit: a mistake raises UsageError.

    Every rank of a job prints the same help, so only rank 0 does.
    """

    def __init__(self, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise UsageError(f"{brief(message, 300)}; see {self.prog} --help")

    def print_help(self, file=None):
        if read_launcher(os.environ).rank == 0:
            super().print_help(file)


def add_flags(
    parser: argparse.ArgumentParser,
    names=frozenset(FLAGS),
    every=True,
    help_of=types.MappingProxyType({}),
) -> bool:
    """Add the flags of the named fields and those of MORE; return whether the help hides some.

    every: the help shows all of them, by section; otherwise, if there are many, only the USUAL
    ones. Values stay text, and flags that are not given are absent from the namespace, so read()
    sees all mistakes at once and knows what the user typed. help_of: {field: help in place of its
    own}.
    """
    left = {name: FIELDS[name] for name in FLAGS if name in names} | MORE
    groups = USUAL
    if every or len(left) <= MANY:
        parts = {**SECTIONS, "configuration": Typed}
        groups = [(name, part.__doc__, part.__dataclass_fields__) for name, part in parts.items()]
    for title, text, members in groups:
        if chosen := [left.pop(name) for name in members if name in left]:
            group = parser.add_argument_group(title, text or None)
            for field in chosen:
                own = {"help": help_of[field.name]} if field.name in help_of else {}
                add_field(group, field, **own)
    for field in left.values():
        add_field(parser, field, help=argparse.SUPPRESS)
    for name, (new, _) in RENAMED.items():
        if new in names:
            parser.add_argument(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    return bool(left)


def add_field(group, field: dataclasses.Field, **more) -> None:
    """Add the argument of a field; its value stays text. more: options that override its own."""
    base, is_tuple = kind(field)
    legal, text, choices = field.metadata, field.metadata["help"], field.metadata["choices"] or ()
    form = "SIZE" if legal["in_bytes"] else FORMS.get(base)
    options = {"default": argparse.SUPPRESS, "metavar": legal["metavar"] or form}
    if base is bool:
        action = "store_true" if legal["is_switch"] else argparse.BooleanOptionalAction
        options = {"default": argparse.SUPPRESS, "action": action}
    elif legal["is_positional"]:
        options["nargs"] = "*" if is_tuple else None if field.default is MISSING else "?"
    elif is_tuple:
        options |= {"metavar": EXAMPLES[field.name]} if base is not str else OF_PATHS
    elif len(choices) > MOST_CHOICES:  # too many for one line
        options["metavar"] = "NAME"
        text += ": " + ", ".join(choices)
    elif choices:
        options["metavar"] = "{" + ",".join(map(str, choices)) + "}"
    if (
        field.default not in (None, (), "", MISSING)
        and not legal["is_switch"]
        and ("default" not in text)
    ):
        words = {True: "on", False: "off"} if base is bool else {}
        text += f" (default {words.get(field.default, field.default)})"
    if not legal["is_positional"]:
        options |= {"dest": field.name, "required": field.default is MISSING}
    name = field.name if legal["is_positional"] else flag(field.name)
    names = (legal["short"], name) if legal["short"] else (name,)
    group.add_argument(*names, **{"help": text.replace("%", "%%"), **options, **more})


def parsed(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[dict[str, object], list[str]]:
    """Return ({field: text} of what was typed, problems with what the parser does not know).

    Arguments without a flag may stand before, between and after the flags.
    """
    typed, extras = parser.parse_known_intermixed_args(words)
    return vars(typed), unknown_flags(parser, extras)


def unknown_flags(parser: argparse.ArgumentParser, extras: list[str]) -> list[str]:
    """Return a problem for each flag that the parser did not know, or else each argument.

    The flag belongs to another command or to none; the problem then names the closest one.
    """
    options = [option for action in parser._actions for option in action.option_strings]
    known = [option[2:].replace("-", "_") for option in options if option.startswith("--")]
    found = []
    for word in (extra.split("=", 1)[0] for extra in extras if extra.startswith("--")):
        name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        of_others = name in FLAGS and name not in known
        why = f"{parser.prog} does not use it; leave it out"
        found.append(f"{word}: {why if of_others else unknown_word(name, known, 'flag')}")
    return found or [
        f"{extra!r}: unexpected argument; values follow a flag, as in --steps 10"
        for extra in extras
    ]
