"""Flags, TOML keys and config.toml, all generated from the fields of config.py.

Precedence: preset < config file < flags. Every mistake is collected; a field whose text could not
be read keeps its default and is named in `bad`, so that the checks that follow do not judge it.
"""

import argparse
import dataclasses
import json
import os
import tomllib
import types
import typing
from dataclasses import dataclass

from mpipar.config.fields import Config, flag, settings
from mpipar.config.presets import OF_MODEL, PRESETS
from mpipar.config.sizes import read_bytes
from mpipar.errors import UsageError, suggestion
from mpipar.job.environment import read_launcher

FIELDS = {field.name: field for _, field, _ in settings(Config())}
LAYOUT_AXES = ("dp", "pp", "cp", "tp")
KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
SYNONYMS = {  # other programs' names, for the hint only
    "learning_rate": "lr", "num_layers": "layers", "n_layer": "layers", "hidden_size": "d_model",
    "width": "d_model", "n_embd": "d_model", "num_heads": "heads", "n_head": "heads",
    "block_size": "seq_len", "context": "seq_len", "global_batch": "batch_size",
    "max_steps": "steps", "grad_clip": "clip", "output": "out", "name": "run_name",
}
EXAMPLES = {"stage_layers": "3,2,2,1", "image_shape": "8,8,1", "data": "text.txt"}


@dataclass(frozen=True)
class Reading:
    """What flags and file say: an unresolved Config and all problems of reading it.

    given: fields that the user named. bad: those of them whose text could not be read.
    """

    config: Config
    problems: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    bad: frozenset[str] = frozenset()


def kind(field: dataclasses.Field) -> tuple[type, bool]:
    """(type of one value, whether the field is a tuple of them); `| None` is dropped."""
    annotation = field.type
    if isinstance(annotation, types.UnionType):
        annotation = next(one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations and without its own exit: a mistake raises UsageError.

    Every rank of a job comes to the same help: only the first one prints it.
    """

    def __init__(self, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise UsageError(f"{message}; see {self.prog} --help")

    def print_help(self, file=None):
        if read_launcher(os.environ).rank == 0:
            super().print_help(file)


def count(text: str) -> int:
    """A whole number above 0: the type of an argument."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def add_flags(parser: argparse.ArgumentParser, names=frozenset(FIELDS)) -> None:
    """Add the flags of the named fields in one group per section, and --config.

    Values stay text here and are absent from the namespace when not given: read() must see all
    mistakes at once and must know what the user said.
    """
    for section in dataclasses.fields(Config):
        part = section.type
        chosen = [one for one in dataclasses.fields(part) if one.name in names]
        if chosen:
            group = parser.add_argument_group(section.name, part.__doc__)
            for field in chosen:
                _add_flag(group, field)
    group = parser.add_argument_group("configuration")
    group.add_argument("--layout", default=argparse.SUPPRESS, metavar="dp=2,pp=2,tp=2",
                       help="short for --dp 2 --pp 2 --tp 2")
    group.add_argument("--config", metavar="FILE.toml",
                       help="read these keys first; flags go before them")
    group.add_argument("--print-config", action="store_true",
                       help="print the configuration that results as TOML and stop")


def _add_flag(group, field: dataclasses.Field) -> None:
    base, is_tuple = kind(field)
    legal, text = field.metadata, field.metadata["help"]
    options = {"dest": field.name, "default": argparse.SUPPRESS}
    if base is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif is_tuple:
        options["metavar"] = EXAMPLES[field.name]
        if base is str:
            options |= {"nargs": "+", "metavar": "PATH"}
    elif legal["choices"]:
        options["metavar"] = "{" + ",".join(legal["choices"]) + "}"
    elif legal["in_bytes"]:
        options["metavar"] = "SIZE"
    else:
        options["metavar"] = {int: "N", float: "X", str: "TEXT"}[base]
    if field.default not in (None, (), "") and "default" not in text:
        shown = {True: "on", False: "off"}.get(field.default) if base is bool else field.default
        text += f" (default {shown!s})"
    group.add_argument(flag(field.name), help=text.replace("%", "%%"), **options)


def hint(word: str, names) -> str:
    """'; did you mean --seq-len?' for a misspelt flag or key, of the fields in `names`."""
    options = {name.replace("_", "-"): flag(name) for name in names}
    options |= {other.replace("_", "-"): flag(name) for other, name in SYNONYMS.items()
                if name in names and other not in names}
    return suggestion(word.lstrip("-").replace("_", "-"), options)


def unknown_flags(parser: argparse.ArgumentParser, extras: list[str]) -> list[str]:
    """One problem for each argument the parser did not know: another command's, or none's, with the
    closest flag it has.
    """
    known = [option[2:].replace("-", "_") for action in parser._actions
             for option in action.option_strings if option.startswith("--")]
    found, after_flag = [], False
    for extra in extras:
        if extra.startswith("--"):
            word = extra.split("=", 1)[0]
            if word.removeprefix("--").removeprefix("no-").replace("-", "_") in FIELDS:
                found.append(f"{word}: {parser.prog} does not use it; leave it out")
            else:
                found.append(f"{word}: unknown flag{hint(word, known)}")
        elif not after_flag:
            found.append(f"{extra!r}: unexpected argument; values follow a flag, as in --steps 10")
        after_flag = extra.startswith("--")
    return found


def join_negative(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Write `--lr -1e-3` as `--lr=-1e-3`: argparse takes -1e-3 and -inf for flags otherwise."""
    takes_value = {option for action in parser._actions for option in action.option_strings
                   if action.nargs is None and action.option_strings}
    joined = []
    for word in argv:
        negative = word.startswith("-") and not word.startswith("--") and len(word) > 1
        if negative and joined and joined[-1] in takes_value:
            joined[-1] += "=" + word
        else:
            joined.append(word)
    return joined


def read(namespace: argparse.Namespace, problems: list[str] | None = None) -> Reading:
    """The unresolved Config that --config and the flags make up; nothing is raised.

    `problems`: found before (unknown flags); they stand first.
    """
    problems, bad = list(problems or []), set()
    from_file = {}
    if getattr(namespace, "config", None):
        from_file = _read_file(namespace.config, problems)
    given = {name: value for name, value in vars(namespace).items()
             if name in FIELDS or name == "layout"}
    values = {}
    for source, is_text in ((from_file, False), (given, True)):
        for name, raw in _expand_layout(source, problems).items():
            try:
                values[name] = _value(FIELDS[name], raw, is_text)
            except ValueError as error:
                shown = raw if is_text else f"= {raw!r} in {namespace.config}"
                problems.append(f"{flag(name)} {shown}: {error}")
                bad.add(name)
    return Reading(build(values), tuple(problems), frozenset(values), frozenset(bad))


def _read_file(path: str, problems: list[str]) -> dict:
    """The known keys of a TOML file, spelled as fields."""
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        problems.append(f"--config {path}: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: not a TOML file: {error}")
        return {}
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) or (name not in FIELDS and name != "layout"):
            cure = ("; keys stand at the top level, without tables" if isinstance(value, dict)
                    else hint(key, [*FIELDS, "layout"]))
            problems.append(f"--config {path}: {key}: unknown key{cure}")
        elif name in found:
            problems.append(f"--config {path}: {key}: given twice, with a hyphen and an underscore")
        else:
            found[name] = value
    return found


def _expand_layout(source: dict, problems: list[str]) -> dict:
    """Replace layout="dp=2,pp=2" by the single axes; both are fine if they agree."""
    layer = dict(source)
    text = layer.pop("layout", None)
    if text is None:
        return layer
    seen = set()
    for part in str(text).split(","):
        name, _, value = part.strip().partition("=")
        if name not in LAYOUT_AXES or not value.isdecimal() or name in seen:
            problems.append(f"--layout {text}: {part.strip()!r} is not understood; each of "
                            f"{', '.join(LAYOUT_AXES)} at most once, as in dp=2,pp=2,tp=2")
        elif name in layer and str(layer[name]) != value:
            problems.append(f"--layout {text}: contradicts {flag(name)} {layer[name]}; give one")
        else:
            layer.setdefault(name, int(value))
        seen.add(name)
    return layer


def _value(field: dataclasses.Field, raw, is_text: bool):
    """The value of a field from a flag's text or a TOML value; ValueError says what it must be."""
    base, is_tuple = kind(field)
    if field.metadata["in_bytes"] and isinstance(raw, str):
        return read_bytes(raw)
    if not is_tuple:
        return _single(base, raw, is_text)
    if isinstance(raw, str):
        raw = [raw] if base is str else raw.split(",") if is_text else raw
    if not isinstance(raw, list):
        raise ValueError(f"must be a list, as in [{EXAMPLES[field.name]}]")
    try:
        return tuple(_single(base, one, is_text) for one in raw)
    except ValueError as error:
        raise ValueError(f"each of them {error}, as in {EXAMPLES[field.name]}") from None


def _single(base: type, raw, is_text: bool):
    try:
        if is_text and base in (int, float) and isinstance(raw, str):
            return base(raw)
        if base is float and type(raw) is int:
            return float(raw)
    except (ValueError, OverflowError):
        raise ValueError(f"must be {KIND_NAMES[base]}") from None
    if type(raw) is not base:
        raise ValueError(f"must be {KIND_NAMES[base]}")
    return raw


def build(values: dict) -> Config:
    """A Config from flat values over their preset; batch size and microbatches wait for resolve."""
    default = OF_MODEL.get(values.get("model", "decoder"), "tiny")
    values = {"preset": default} | values
    preset = PRESETS.get(values["preset"], {})
    values = {name: value for name, value in preset.items()
              if name not in ("batch_size", "num_microbatches")} | values
    parts = {}
    for section in dataclasses.fields(Config):
        names = [field.name for field in dataclasses.fields(section.type)]
        parts[section.name] = section.type(**{n: values[n] for n in names if n in values})
    return Config(**parts)


def to_toml(config: Config) -> str:
    """The config as TOML; --config reads it back to an equal Config. None is an absent key."""
    lines, last = [], None
    for section, field, value in settings(config):
        if section != last:
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
            last = section
        if value is not None:
            lines.append(f"{flag(field.name)[2:]} = {_literal(value)}")
    return "\n".join(lines) + "\n"


def _literal(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which TOML forbids bare
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
