"""A row of the table of combinations: what is illegal, why, and what to type instead."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace

from mpipar.config.layout import divisors
from mpipar.config.sections import Config, in_force, named
from mpipar.config.text import counted, shown

PLAIN = re.compile(r"[\w.,:/+=-]+")  # a value that needs no quotes in a sentence


@dataclass(frozen=True)
class Rule:
    """One kind of illegal combination.

    name: of this row. fields: the settings it relates; a refusal begins with them and their values.
    broken: whether values (see `values_of`) are illegal. sentence: why, and what to type instead;
    it may hold {name} of a value.
    complete: whether it judges the configuration after layout and microbatches are chosen;
    otherwise it judges what was typed.
    """

    name: str
    fields: tuple[str, ...]
    broken: Callable[[SimpleNamespace], object]  # true or not
    sentence: str
    complete: bool = False

    def problem(self, values: SimpleNamespace) -> str:
        """Return what is wrong, why, and what to type instead."""
        return f"{subject(self.fields, values)}: {self.sentence.format_map(vars(values))}"


def values_of(config: Config, **facts) -> SimpleNamespace:
    """Return every setting in force of a Config by its name, and what else rules judge by.

    facts: `ranks`, their number. free: the axes that were not given. csv: the schedule in the file
    of --schedule-csv. machine, chooses_layout: --machine, and whether --layout is auto.
    fewer_islands, fewer_experts: the next legal --islands and, inside an island, --ep.
    """
    usual = {"ranks": None, "free": frozenset(), "csv": None, "machine": None}
    usual |= {"chooses_layout": False, "axes_product": config.grid.num_ranks}
    grid, experts = config.grid, vars(config.model).get("experts") or 1
    inside = (grid.dp or 1) // (grid.islands or 1) * grid.cp
    usual["fewer_islands"] = largest_divisor(grid.dp or 1, grid.islands)
    usual["fewer_experts"] = largest_divisor(math.gcd(inside, experts), grid.ep)
    return SimpleNamespace(**in_force(config), **usual | facts)


def largest_divisor(number: int, most: int | None) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return max(one for one in divisors(number or 1) if one <= max(most or 1, 1))


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
    first, *more = (
        named(name) if value is True else f"{named(name)} {typed(value)}"
        for name, value in told.items()
        if value not in (None, (), False) or type(value) is int
    )
    without = [named(name) for name, value in told.items() if value is False]
    parts = [first, f"with {listed(more)}" * bool(more), f"without {listed(without)}"]
    parts[2] *= bool(without)
    return " ".join(filter(None, [*parts, f"on {counted(ranks, 'rank')}" if ranks else ""]))


def listed(words: list[str]) -> str:
    """Join words as in 'a, b and c'."""
    *most, last = words or [""]
    return f"{', '.join(most)} and {last}" if most else last
