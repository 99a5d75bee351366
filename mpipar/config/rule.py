"""A row of the table of combinations: what is illegal, why, and what to type instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace

from mpipar.config.model import CUTS, ModelConfig
from mpipar.config.sections import Config, in_force
from mpipar.config.setting import flag
from mpipar.files.text import counted, shown

Cures = Mapping[str, Iterable]
SHAPE = {one.name for one in fields(ModelConfig)} - CUTS  # of weights
PLAIN = re.compile(r"[\w.,:/+=-]+")  # a value that needs no quotes in a sentence


@dataclass(frozen=True)
class Rule:
    """One kind of illegal combination. A refusal's message is built from this row alone.

    name: of this row. fields: the settings it relates; the message begins with the first one.
    reason: why this is illegal.
    broken: whether values (see `values_of`) are illegal. cures: {field: its nearest legal values},
    each of which is enough by itself; None means leaving the flag out.
    example: flags that break this rule on so many `ranks`.
    complete: whether it judges the configuration after layout and microbatches are chosen;
    otherwise it judges what was typed.
    """

    name: str
    fields: tuple[str, ...]
    reason: str
    broken: Callable[[SimpleNamespace], object]  # true or not
    cures: Callable[[SimpleNamespace], Cures]
    example: str
    ranks: int = 1
    complete: bool = False

    def problem(self, values: SimpleNamespace) -> str:
        """Return what is wrong, why, and what to type instead."""
        cure = self.cure(values)
        return f"{subject(self.fields, values)}: {self.reason}" + (cure and f"; {cure}")

    def cure(self, values: SimpleNamespace) -> str:
        """Return what to type instead; never another model shape where weights fix it."""
        fixed = SHAPE if getattr(values, "init_from", None) else ()
        found = {
            name: list(legal) for name, legal in self.cures(values).items() if name not in fixed
        }
        return cure_text({name: legal for name, legal in found.items() if legal})


def values_of(config: Config, **facts) -> SimpleNamespace:
    """Return every setting in force of a Config by its name, and what else rules judge by.

    facts: `ranks`, their number. free: the axes that were not given. csv: the schedule in the file
    of --schedule-csv. machine, chooses_layout: --machine, and whether --layout is auto.
    """
    known = {
        "ranks": None,
        "free": frozenset(),
        "csv": None,
        "machine": None,
        "chooses_layout": False,
    }
    return SimpleNamespace(**in_force(config), **known | facts)


def broken_of(
    rules: Iterable[Rule], values: SimpleNamespace, bad: Iterable[str] = ()
) -> list[Rule]:
    """Return the rules that these values break.

    A rule is skipped if a setting that it relates is in `bad` or not in force.
    """
    known = vars(values).keys() - set(bad)
    return [rule for rule in rules if known >= set(rule.fields) and rule.broken(values)]


def typed(value) -> str:
    """Return a value as the user types it."""
    if isinstance(value, tuple):
        return ",".join(map(typed, value))
    text = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else shown(text)


def subject(names: tuple[str, ...], values: SimpleNamespace) -> str:
    """Return the settings of a rule with their values, without those that were not given."""
    told = {name: getattr(values, name) for name in names}
    ranks = told.pop("ranks", None)
    given = [
        flag(name) if value is True else f"{flag(name)} {typed(value)}"
        for name, value in told.items()
        if value is not False and value not in (None, ())
    ]
    without = [flag(name) for name, value in told.items() if value is False]
    text = given[0] + (f" with {listed(given[1:], 'and')}" if given[1:] else "")
    text += f" without {listed(without, 'and')}" if without else ""
    return text + (f" on {counted(ranks, 'rank')}" if ranks else "")


def listed(words: list[str], last: str) -> str:
    """Join words as in 'a, b and c'."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def cure_text(cures: dict[str, list]) -> str:
    """Return cures as in 'use --heads 1, 2 or 4, or --head-dim 42, or leave --tf32 out'."""
    used, others, left_out = [], [], [flag(name) for name in cures if None in cures[name]]
    for name, legal in cures.items():
        words = [typed(value) for value in legal if value is not None and value is not True]
        if name == "ranks":
            others.append(f"start them with mpiexec -n {listed(words, 'or')}")
        elif any("," in word for word in words):
            used.append(listed([f"{flag(name)} {word}" for word in words], "or"))
        elif words:
            used.append(f"{flag(name)} {listed(words, 'or')}")
        others += [f"add {flag(name)}"] * any(value is True for value in legal)
    others += [f"leave {listed(left_out, 'or')} out"] if left_out else []
    return ", or ".join([*(["use " + ", or ".join(used)] if used else []), *others])
