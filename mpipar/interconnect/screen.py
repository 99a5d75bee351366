"""What is printed: tables of at most 100 columns under nccl-tests' names, and six closing lines.

time is the median of one operation in us; algbw is the size over it, and busbw the part of it that
the busiest link carries, both in 1e9 bytes per second. i_min, i_max, i_p99 (from 100 samples on)
and i_cv% are of the samples. Of several launches, low and high enclose the median of another launch
with 95 % probability, and best and worst are of the launches; two launches, or launches in two
modes, say no more than their range. #wrong is 0: a wrong payload is refused, and not timed.
"""

import math
import textwrap
from collections.abc import Callable
from typing import Any

from mpipar.interconnect.arguments import BY
from mpipar.interconnect.cases import BARE, COMM
from mpipar.interconnect.files import Row
from mpipar.interconnect.hosts import LINKS
from mpipar.interconnect.vet import SIZES, Found, Link, Slow, verdict
from mpipar.run.console.tables import nbytes

Cell = Callable[[Row], str]
WIDTH, INDENT = 100, " " * 12
LEAST_GAIN = 1.1  # of an algorithm that is worth naming
SLOW_SHARE = 0.5  # of what is normal: below, the verdict says so
MOST_NAMED = 3


def digits(value: Any) -> str:
    """Return a number with four significant digits, never with an exponent; - for None."""
    if value is None:
        return "-"
    whole = math.floor(math.log10(value)) if value > 0 else 3
    return f"{value:.{min(4, max(0, 3 - whole))}f}"


def number(name: str) -> Cell:
    """Return the cell of a column of the row."""
    return lambda row: digits(row[name])


def short(via: str) -> str:
    """Return the name of a way as --via has it."""
    return "comm" if via == COMM else via.lower().removeprefix("by ")


ALWAYS: dict[str, tuple[int, Cell]] = {  # name: (width, cell)
    "size": (11, lambda row: str(row["size_bytes"])),
    "count": (11, lambda row: str(row["count"])),
    "via": (9, lambda row: short(row["via"])),
    "time": (9, number("median_us")),
    "algbw": (8, number("algbw_GBps")),
    "busbw": (8, number("busbw_GBps")),
}
SPREAD: dict[str, tuple[int, Cell]] = {
    "i_min": (9, number("min_us")),
    "i_max": (9, number("max_us")),
    "i_p99": (9, number("p99_us")),
    "i_cv%": (7, lambda row: f"{row['cv_percent']:.1f}"),
}
LAUNCHES: dict[str, tuple[int, Cell]] = {
    "low": (9, number("low_us")),
    "high": (9, number("high_us")),
    "best": (8, number("best_us")),
    "worst": (8, number("worst_us")),
}
WRONG: dict[str, tuple[int, Cell]] = {"#wrong": (7, lambda row: "0")}
CASE: dict[str, tuple[int, Cell]] = {"case": (15, lambda row: row["case"])}


def columns(rows: list[Row], quick: bool) -> dict[str, tuple[int, Cell]]:
    """Return the columns of a table: {name: (width, cell)}."""
    spread = LAUNCHES if "launches" in rows[0] else SPREAD
    if not quick:
        return ALWAYS | spread | WRONG
    ratio = {"/mpi4py": (8, lambda row: digits(row.get("over_mpi4py")))}
    kept = {name: ALWAYS[name] for name in ("size", "time", "algbw", "busbw")}
    return CASE | kept | spread | WRONG | ratio


def table(rows: list[Row], quick: bool = False) -> str:
    """Return the rows under the names of their columns."""
    chosen = columns(rows, quick)
    head = "".join(name.rjust(width) for name, (width, _) in chosen.items())
    lines = ["".join(cell(row).rjust(w) for w, cell in chosen.values()) for row in rows]
    return "\n".join(["#" + head[1:], *lines])


def title(row: Row) -> str:
    """Return what the rows of a table have in common."""
    ranks = row["ranks"]
    names = ",".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]}..{ranks[-1]}"
    mode = {
        "alone": f", one {row['axis']} group",
        "together": f", all {row['axis']} groups, the slowest",
    }.get(row["mode"], "")
    window = f", window {row['window']}" if row["window"] > 1 else ""
    what = (
        "; {launches} launches, another is between low and high".format(**row)
        if "launches" in row
        else ""
    )
    return textwrap.fill(
        f"# {row['case']}: ranks {names} ({row['link']}){mode}, {row['dtype']},"
        f" {row['transport']}, buffers {row['buffers']}{window}{what}",
        WIDTH,
        subsequent_indent="#   ",
    )


def slowest(rows: list[Row]) -> list[Row]:
    """Return the rows of one table, small sizes first: of groups at once, the slowest."""
    found: dict[Any, Row] = {}
    for row in rows:
        key = row["size_bytes"], row["via"]
        if key not in found or row["median_us"] > found[key]["median_us"]:
            found[key] = row
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1] in BY, key[1]))]


def by_table(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each table, in order of appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["axis"], row["mode"]), []).append(row)
    return [slowest(own) for own in found.values()]


def text(rows: list[Row], quick: bool = False) -> str:
    """Return every table with its title, and the notes on its rows."""
    if quick:
        own = [row for some in by_table(rows) for row in beside(some)]
        return "\n".join([table(own, quick=True), *notes(own, MOST_NAMED)]) if own else ""
    parts = [
        line for own in by_table(rows) for line in (title(own[0]), table(own), *notes(own), "")
    ]
    return "\n".join(parts)


def beside(rows: list[Row]) -> list[Row]:
    """Return the rows through mpipar.comm, each with its time over that of bare mpi4py."""
    bare = {row["size_bytes"]: row["median_us"] for row in rows if row["via"] == BARE}
    own = [row for row in rows if row["via"] == COMM]
    return [
        row | {"over_mpi4py": row["median_us"] / bare[row["size_bytes"]]}
        if bare.get(row["size_bytes"])
        else row
        for row in own
    ]


def notes(rows: list[Row], most: int = 100) -> list[str]:
    """Return lines on rows in two modes, at most so many, and one on overlap."""
    found = [
        f"# two modes: {row['case']} {nbytes(row['size_bytes'])} {short(row['via'])}:"
        f" {1 - row['slow_share']:.0%} near {digits(row['fast_us'])} us,"
        f" the others near {digits(row['slow_us'])} us"
        for row in rows
        if "slow_share" in row
    ]
    more = [f"# two modes: {len(found) - most} more rows"] if len(found) > most else []
    hidden = [row for row in rows if "overlap_percent" in row]
    parts = ", ".join(
        f"{nbytes(row['size_bytes'])} {short(row['via'])} {row['overlap_percent']:.0f} %"
        for row in hidden[-MOST_NAMED:]
    )
    last = [f"# hidden by computing with {row['num_tests']} tests: {parts}" for row in hidden[:1]]
    return found[:most] + more + last


def best_algorithms(rows: list[Row]) -> str:
    """Return where another algorithm beats the library's all-reduce, or ""."""
    found = []
    for own in by_table(rows):
        for row in (row for row in own if row["via"] == COMM):
            others = [
                one for one in own if one["via"] in BY and one["size_bytes"] == row["size_bytes"]
            ]
            best = min(others, key=lambda one: one["median_us"], default=row)
            if row["median_us"] > LEAST_GAIN * best["median_us"]:
                gain = row["median_us"] / best["median_us"]
                found.append((gain, nbytes(row["size_bytes"]), short(best["via"])))
    parts = [f"{name} {gain:.1f} times at {size}" for gain, size, name in sorted(found)[::-1]]
    return f"faster than the default all-reduce: {', '.join(parts[:MOST_NAMED])}" if parts else ""


def contention(rows: list[Row]) -> list[str]:
    """Return how much longer groups take while the others communicate too, at the largest size."""
    found = []
    for own in by_table([row for row in rows if row["mode"] == "together"]):
        last = [row for row in own if row["via"] == COMM][-1:]
        for row in last:
            alone = [
                one["median_us"]
                for one in rows
                if one["mode"] == "alone"
                and all(one[name] == row[name] for name in ("case", "axis", "via", "size_bytes"))
            ]
            if alone:
                found.append(
                    f"contention: {row['case']}, all {row['axis']} groups at once take"
                    f" {row['median_us'] / alone[0]:.2f} times as long at"
                    f" {nbytes(row['size_bytes'])}"
                )
    return found


class Closing:
    """The six lines that fit into a ticket.

    refused: cases whose payload was wrong. found, slow: of `vet`, if pairs were measured. sheet:
    what links should do, if it is known.
    """

    def __init__(
        self,
        head: Row,
        rows: list[Row],
        refused: list[str],
        found: Found | None = None,
        slow: list[Slow] | None = None,
        sheet: dict[str, Link] | None = None,
    ):
        self.head, self.found, self.slow, self.sheet = head, found, slow or [], sheet
        self.refused = refused
        self.rows = [row for row in rows if row["via"] == COMM] or rows
        self.problems: list[str] = []

    def of(self, case: str, last: bool) -> Row | None:
        """Return the row of a case at its largest or smallest size."""
        own = sorted(
            (row for row in self.rows if row["case"] == case and row["size_bytes"]),
            key=lambda row: row["size_bytes"],
        )
        return (own[-1] if last else own[0]) if own else None

    def normal(self, what: str, link: str) -> tuple[float, str] | None:
        """Return (GB/s or us, where it is known from) of what is normal on a link."""
        if self.sheet:
            rate, latency = self.sheet[link]
            return (rate if what == "transfer" else latency), "the sheet's link"
        if self.found and len(self.found[what]) > 1:
            best = min(self.found[what].values())
            value = SIZES[what] / best * 1e-9 if what == "transfer" else best * 1e6
            return value, "the best pair"
        if what == "transfer" and link == LINKS[0]:
            return self.head["memory_copy_GBps"], "a memory copy"
        return None

    def line(self, case: str, what: str, unit: str, value: str) -> str:
        """Return the line of a case, and remember if it is far from normal."""
        row = self.of(case, last=what == "transfer")
        if row is None:
            return "not measured"
        normal = self.normal(what, row["link"])
        text = f"{digits(row[value])} {unit} at {nbytes(row['size_bytes'])}, {row['link']}"
        if normal is None:
            return text
        share = row[value] / normal[0] if what == "transfer" else normal[0] / max(row[value], 1e-9)
        if share < SLOW_SHARE and normal[1] != "a memory copy":
            self.problems.append(f"{case} {share:.0%} of {normal[1]}")
        return f"{text}; normal: {digits(normal[0])}, {normal[1]}"

    def lines(self) -> list[str]:
        """Return the lines."""
        head, self.problems = self.head, []
        latency = self.line("latency", "latency", "us", "median_us")
        bandwidth = self.line("bandwidth", "transfer", "GB/s one way", "busbw_GBps")
        sums = self.line("all-reduce", "transfer", "GB/s busbw", "busbw_GBps")
        problems = [f"{len(self.refused)} wrong payloads"] * bool(self.refused)
        if head["crowded"]:
            problems.append("more ranks than cores on a host, so times say little")
        else:
            names = [str(place["host"]) for place in head["places"]]
            bad = verdict(self.slow, names)
            problems += [line for line in bad if not line.startswith(("Vetted", "--"))]
            problems += self.problems
        if modes := sum("slow_share" in row for row in self.rows):
            problems.append(f"two modes in {modes} of {len(self.rows)} rows")
        named = "; ".join(problems[:MOST_NAMED]) + "; ..." * (len(problems) > MOST_NAMED)
        lines = [
            f"hosts       {head['hosts']}",
            f"MPI         {head['library']}, {head['transport']}, {head['launcher']}",
            f"latency     {latency}",
            f"bandwidth   {bandwidth}",
            f"all-reduce  {sums}",
            f"verdict     {named or 'nothing unusual'}",
        ]
        return [textwrap.fill(line, WIDTH, subsequent_indent=INDENT) for line in lines]
