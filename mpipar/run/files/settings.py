"""From a command line and a TOML file to a Config, and back to config.toml.

There is one flag per field of a configuration. Precedence: preset < settings of the resumed run <
config file < flags. Every mistake is collected. A field whose text could not be read keeps its
default and is named in `bad`, so that later checks do not judge it.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from fractions import Fraction
from itertools import groupby
from operator import itemgetter

from mpipar.comm.grid import AXES, LAYOUT
from mpipar.comm.launcher import read_launcher
from mpipar.config.grid import AUTO
from mpipar.config.names import EXAMPLES, RENAMED, gone, unknown_word
from mpipar.config.sections import (
    FIELDS,
    FLAGS,
    SECTIONS,
    Config,
    build,
    in_force,
    named,
    not_taken,
    settings,
)
from mpipar.config.setting import argument, field_problem, flag, kind, read_bytes, setting, switch
from mpipar.config.text import brief, shown
from mpipar.errors import UsageError
from mpipar.run.files.bounded import parse_toml, read_toml

MANY = 28  # flags; a command with more of them shows only the common ones
MOST_CHOICES = 8  # that are listed after a flag
FORMS = {int: "N", float: "X", str: "TEXT"}  # placeholders for values in the help
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
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=form, **options)

    def error(self, message):
        raise UsageError(f"{brief(message, 300)}; see {self.prog} --help")

    def print_help(self, file=None):
        if read_launcher(os.environ).rank == 0:
            super().print_help(file)


def add_flags(
    parser: argparse.ArgumentParser, names, every: bool, help_of: Mapping[str, str]
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
        groups = [
            (name, part.__doc__, part.__dataclass_fields__)
            for name, part in {**SECTIONS, "configuration": Typed}.items()
        ]
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
        options = {
            "default": argparse.SUPPRESS,
            "action": "store_true" if legal["is_switch"] else argparse.BooleanOptionalAction,
        }
    elif legal["is_positional"]:
        options["nargs"] = "*" if is_tuple else None if field.default is MISSING else "?"
    elif is_tuple:
        options |= (
            {"nargs": "+", "metavar": "PATH"} if base is str else {"metavar": EXAMPLES[field.name]}
        )
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

    Arguments without a flag may stand before, between and after the flags. A problem is reported
    for each unknown flag, or else for each unknown argument. The flag belongs to another command
    or to none; the problem then names the closest one.
    """
    typed, extras = parser.parse_known_intermixed_args(words)
    options = [option for action in parser._actions for option in action.option_strings]
    known = [option[2:].replace("-", "_") for option in options if option.startswith("--")]
    found = []
    for word in (extra.split("=", 1)[0] for extra in extras if extra.startswith("--")):
        name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        of_others = name in FLAGS and name not in known
        why = f"{parser.prog} does not use it; leave it out"
        found.append(f"{word}: {why if of_others else unknown_word(name, known, 'flag')}")
    return vars(typed), found or [
        f"{extra!r}: unexpected argument; values follow a flag, as in --steps 10"
        for extra in extras
    ]


# --- from texts to values

RANKS = re.compile("[0-9]{1,9}")
# A larger exponent would make an exact number endlessly long.
EXACT = re.compile(r"\s*\d{0,9}[./]?\d{0,9}([eE][+-]?\d)?\s*", re.ASCII)
KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Fraction: "a number of at most 9 digits, such as 0.25 or 1/3",
}


@dataclass(frozen=True)
class ParsedConfig:
    """What flags and config file say: an unresolved Config, and what was wrong in reading it.

    given: the fields that the user named, with their values.
    bad: fields that the user named but whose text could not be read.
    unread: the problems that concern unreadable text. chooses_layout: whether axes that are not
    given are chosen by their predicted step (--layout auto). prints: whether the configuration is
    only to be printed. notes: on settings that are gone, for the user.
    """

    config: Config
    given: Mapping[str, object] = dataclasses.field(default_factory=dict)
    bad: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    chooses_layout: bool = False
    prints: bool = False
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems in reading it, and those of fields whose choice is not taken.

        Nothing is judged if a preset or the choice itself has an unknown value.
        """
        values, found = in_force(self.config), [*self.unread]
        for name in self.given:
            choice, *wanted = not_taken(name, values) or (None,)
            if choice and all(
                values[one] in (FIELDS[one].metadata["choices"] or (None,))
                for one in (choice, "preset")
            ):
                whose = f"{flag(choice)} {' or '.join(map(str, wanted))}".rstrip()
                now = "not given" if values[choice] is None else values[choice]
                found.append(
                    f"{named(name)}: belongs to {whose}, but {flag(choice)} is {now}; leave it"
                    f" out, or type {flag(choice)} {(*wanted, EXAMPLES.get(choice))[0]}"
                )
        return tuple(found)


def read(
    typed: Mapping[str, object], problems: Iterable[str] = (), may_choose: bool = False
) -> ParsedConfig:
    """Return the unresolved Config that --config and the flags make up; it raises nothing.

    typed: the text of each given flag, by field. problems: those found so far (unknown flags),
    which come first. may_choose: whether the command accepts --layout auto.
    """
    problems, notes, path = list(problems), [], typed.get("config")
    of_file = _read_file(str(path), problems, notes) if path is not None else {}
    of_flags = dict(today(*one) for one in typed.items() if one[0] in {*FIELDS, *RENAMED, "layout"})
    values, bad, chooses = {}, set(), False
    for source, where in ((of_file, path), (of_flags, None)):
        chooses = source.get("layout", AUTO if chooses else None) == AUTO
        if source.get("layout") == AUTO:  # a flag overrides the axes of the file
            values = {name: value for name, value in values.items() if name not in LAYOUT}
            del source["layout"]
        axes = expand_layout(source, problems, LAYOUT)
        found = _read_values(FIELDS, axes, problems, where)
        values |= found
        bad |= axes.keys() - found.keys()
    if chooses and not may_choose:
        problems.append(
            "--layout auto: only mpipar train accepts it; name the axes, as in --layout dp=2,pp=2"
        )
    return ParsedConfig(
        build(values),
        given=values,
        bad=frozenset(bad),
        unread=tuple(problems),
        chooses_layout=chooses,
        prints="print_config" in typed,
        notes=tuple(notes),
    )


def _read_values(fields: Mapping[str, dataclasses.Field], source, problems, path=None) -> dict:
    """Return the values in `source` that can be read; the others are problems.

    path: of the TOML file that they come from, None for flags.
    """
    found = {}
    for name, raw in source.items():
        try:
            value = _value(fields[name], raw, path is None)
            many = value if isinstance(value, tuple) else (value,)
            if name != "prompt" and "" in many:  # the text of an unset variable
                raise ValueError("must not be empty; give a value")
            found[name] = value
        except ValueError as error:
            where = brief(str(raw)) or "''" if path is None else f"= {shown(raw)} in {path}"
            example = f", as in {EXAMPLES[name]}" if name in EXAMPLES else ""
            problems.append(f"{argument(name, fields[name].metadata)} {where}: {error}{example}")
    return found


def today(name: str, value):
    """Return (name, value) of a setting in today's words."""
    new, values = RENAMED.get(name, (name, {}))
    return new, values.get(str(value), value)


def read_arguments(form: type, typed: Mapping[str, object], problems: list[str]):
    """Return a command's own arguments: an instance of the dataclass `form`.

    typed: as in `read`. Problems are added to `problems`; the arguments concerned keep their
    defaults or, if they have none, a value that is out of bounds. None if such an argument cannot
    be read at all.
    """
    fields = {field.name: field for field in dataclasses.fields(form)}
    given = {name: text for name, text in typed.items() if name in fields}
    values = _read_values(fields, given, problems)
    for name, value in [*values.items()]:
        choice, *wanted = fields[name].metadata["only"] or (name, value)
        if problem := field_problem(fields[name], value):
            problems.append(problem)
            if fields[name].default is not MISSING:
                del values[name]
        elif (taken := values.get(choice)) not in wanted:
            problems.append(f"{flag(name)}: {brief(str(taken))} does not use it; leave it out")
    needed = {name for name, field in fields.items() if field.default is MISSING}
    return form(**values) if needed <= values.keys() else None


def over(saved: Mapping[str, object], parsed: ParsedConfig) -> ParsedConfig:
    """Return the configuration with an earlier run's settings beneath what the user named."""
    return dataclasses.replace(parsed, config=build({**saved, **parsed.given}))


def forced(parsed: ParsedConfig, config: Config) -> ParsedConfig:
    """Return it with a Config that holds whatever the user named.

    What was named for a field that this changes or puts out of force is not judged.
    """
    before, now = in_force(parsed.config), in_force(config)
    given = {
        name: value for name, value in parsed.given.items() if before.get(name) == now.get(name)
    }
    return dataclasses.replace(parsed, config=config, given=given)


def _read_file(path: str, problems: list[str], notes: list[str]) -> dict:
    """Return the known keys of a TOML file, spelled as fields; add problems and notes."""
    where = "--config " + (path or "''")
    try:
        table = read_toml(path, UsageError, where=where)
    except UsageError as error:
        problems += error.problems
        return {}
    found, wrong, news = _keys(table)
    problems += [f"{where}: {text}" for text in wrong]
    notes += [f"{where}: {text}" for text in news]
    return found


def _keys(table: dict) -> tuple[dict, list[str], list[str]]:
    """Return ({field or "layout": raw value}, problems, notes on keys that are gone) of TOML."""
    found, problems, notes = {}, [], []
    for key, value in table.items():
        old = key.replace("-", "_")
        name, raw = today(old, value)
        try:
            if isinstance(value, dict):
                raise ValueError(f"{brief(key)}: unknown key; keys are at the top level")
            if note := gone(old, value):
                notes.append(note)
            elif name in found:
                raise ValueError(f"{brief(key)}: given twice, under two spellings; keep one")
            elif name in FIELDS or name == "layout":
                found[name] = raw
            else:
                raise ValueError(f"{brief(key)}: {unknown_word(key, [*FIELDS, 'layout'], 'key')}")
        except ValueError as error:
            problems.append(str(error))
    return found, problems, notes


def expand_layout(source: dict, problems: list[str], names: Collection[str] = AXES) -> dict:
    """Replace layout="dp=2,pp=2" by single axes; both may be given if they agree.

    Problems are added to `problems`. names: the axes that a layout may name.
    """
    layer, seen = dict(source), set()
    text = str(layer.pop("layout", ""))
    for part in map(str.strip, text.split(",") if "layout" in source else ()):
        name, _, value = part.partition("=")
        if name not in names or not RANKS.fullmatch(value) or name in seen:
            problems.append(
                f"--layout {brief(text)}: {shown(part)} is not understood; name each "
                f"of {', '.join(names)} at most once, as in dp=2,pp=2,tp=2"
            )
        elif str(given := layer.setdefault(name, int(value))) != value:
            problems.append(
                f"--layout {brief(text)}: contradicts {flag(name)} {brief(str(given))}; give one"
            )
        seen.add(name)
    return layer


def _value(field: dataclasses.Field, raw, is_text: bool):
    """Return a field's value from a flag's text or a TOML value; ValueError says what is wrong."""
    base, is_tuple = kind(field)
    if field.name == "prompt":  # any text; Python may have read it as ASCII with escaped bytes
        return str(raw).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    if field.metadata["in_bytes"] and isinstance(raw, str):
        return read_bytes(raw)
    if not is_tuple:
        return _single(base, raw, is_text)
    if isinstance(raw, str) and (is_text or base is str):
        raw = [raw] if base is str else raw.split(",")
    if not isinstance(raw, list) or (not raw and field.default != ()):
        raise ValueError("must be a list that is not empty")
    return tuple(_single(base, one, is_text) for one in raw)


def _single(base: type, raw, is_text: bool):
    is_written = is_text and isinstance(raw, str)
    readable = base in (int, float) or (base is Fraction and EXACT.fullmatch(str(raw)))
    with suppress(ValueError, ArithmeticError):
        if (is_written and readable) or (base is float and type(raw) is int):
            return base(raw)
    if type(raw) is not base:
        raise ValueError(f"must be {KIND_NAMES[base]}")
    return raw


def values_of(text: str) -> dict[str, object]:
    """Return the values of the fields that to_toml wrote; ValueError for any other text."""
    found, problems, _ = _keys(parse_toml(text))
    if problems or "layout" in found:
        raise ValueError([*problems, "layout is no saved setting; name its axes"][0])
    return {name: _value(FIELDS[name], raw, False) for name, raw in found.items()}


def skipped(text: str) -> list[str]:
    """Return a note on each key of a saved configuration that `values_of` skips."""
    return _keys(parse_toml(text))[2]


def to_toml(config: Config) -> str:
    """Return the config as TOML that --config reads back to an equal one; None: no such key."""
    parts = []
    for section, rows in groupby(settings(config), itemgetter(0)):
        lines = [
            # JSON's words and escapes are TOML's, except that TOML forbids a bare DEL.
            f"{flag(field.name)[2:]} = "
            + json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            for _, field, value in rows
            if value is not None
        ]
        parts.append("\n".join([f"# {section}", *lines, ""]))
    return "\n".join(parts)
