"""Prints tables of a benchmark's rows, with the columns and conventions of nccl-tests.

    python -m bench.table FILE.jsonl [--format text|csv|markdown|osu]

algbw is size over median time; busbw is the part of it that the busiest link carries. Both are in
GB/s = 1e9 B/s. For one launch, "low" and "high" are the 95 % confidence interval of its median, and
say nothing about the next launch. For several launches, they enclose the median of another launch
with 95 % probability; "best" and "worst" are then medians of launches, and within_% is the interval
inside a launch over its median. A "~" after the time means that the ranks' starts differ by more
than a tenth of a sample, which consists of several operations if they are short: such a time says
more about the start than about the operation. n iterations count; "late" ones, which some rank
began after the agreed moment, do not. bound_percent is busbw in percent of the bound in the title,
which is the rate that --bound-GBps states or, inside a host and for orientation, that of a memory
copy; bidirectional has twice the bound. overlap_percent is the share of alone_us that is hidden by
computing_us; time_us then covers both. p5 to max are percentiles of the iterations. skew_us is how
far apart the ranks began.
"slowest" is the rank that was most often the last to leave, and how often. "#wrong" is 0 if the
payload was right. messages_per_s counts all pairs. least_to_peer_bytes and most_ are the shortest
and the longest part of all-to-allv that a rank sends to another. fast_us and slow_us are medians of
two groups that the times of a row form, and slow_share is how many are slow. Cells without a value
are empty.
"""

from __future__ import annotations

import csv
import io
import math
import sys

import numpy as np

from bench import results
from bench.interconnect import records
from bench.interconnect.between import combined
from bench.interconnect.statistics import MODES, times_us
from bench.program import Program
from mpipar.errors import EXIT_OK

SKEW_SHARE = 0.1
TAILS = (50, 90, 99)  # percentiles
OSU_COLUMNS = ("Avg Latency(us)", *(f"P{tail} Tail Lat(us)" for tail in TAILS))
UNCHECKED = "unchecked"
WHERE_KNOWN = (
    "least_to_peer_bytes",
    "most_to_peer_bytes",
    "messages_per_s",
    "bound_percent",
    "alone_us",
    "computing_us",
    "overlap_percent",
    "predicted_us",
    "measured_over_predicted",
    *MODES,
)


def digits(value: float) -> str:
    """Return a number with four significant digits, never with an exponent."""
    whole = math.floor(math.log10(value)) if value > 0 else 3
    return f"{value:.{min(6, max(0, 3 - whole))}f}"


def cells(row: dict) -> dict[str, str]:
    """Return a row's cells by the names of their columns."""

    def numbers(*names) -> dict[str, str]:
        return {name.replace("GBps", "GB/s"): digits(row[name]) for name in names}

    time = {
        "time_us": digits(row["median_us"]),
        "": "~" if row["skew_us"] > SKEW_SHARE * row["median_us"] * row["per_sample"] else "",
    }
    time |= numbers("low_us", "high_us")
    rates = numbers("algbw_GBps", "busbw_GBps", "skew_us")
    if "launches" in row:
        found = {
            "launches": row["launches"],
            **time,
            **numbers("best_us", "worst_us"),
            "within_%": f"{row['within_percent']:.1f}",
            **rates,
        }
    else:
        found = {
            "n": row["iterations"],
            "late": row["late"],
            **time,
            **numbers("p5_us", "p95_us", "p99_us", "max_us"),
            **rates,
            "slowest": f"{row['slowest_rank']} ({row['slowest_share']:.0%})",
        }
    return {
        "size_B": row["size_bytes"],
        "count": row["count"],
        "type": row["dtype"],
        "via": row["via"],
        **found,
        "#wrong": 0 if row["checked"] == "ok" else UNCHECKED,
        **numbers(*(name for name in WHERE_KNOWN if name in row)),
    }


def text(rows) -> str:
    """Return the rows of one case as a table, small sizes first."""
    ordered = sorted(rows, key=lambda row: (row["size_bytes"], row["ranks"], row["via"]))
    return results.text_table([cells(row) for row in ordered])


def title(row: dict) -> str:
    """Return the title of a table: what its rows have in common."""
    mode = (
        f", one of the {row['axis']} groups"
        if row["mode"] == "alone"
        else (f", all {row['axis']} groups at once" if row["mode"] == "together" else "")
    )
    window = f", window {row['window']}" if row["window"] > 1 else ""
    place = "in place" if row["in_place"] else "out of place"
    start = {"barrier": "", "none": ", back to back"}.get(row["sync"], f", {row['sync']} start")
    bound = f", bound {row['bound_GBps']:.4g} GB/s ({row['bound']})" if "bound" in row else ""
    what = (
        f"{row['launches']} launches; low, high: another launch's median, 95 %"
        if row.get("launches", 1) > 1
        else "low, high: within this launch"
    )
    return (
        f"# {row['case']}: ranks {','.join(map(str, row['ranks']))} ({row['link']}){mode}, "
        f"{row['transport']}, buffers {row['buffers']}, {place}{window}{bound}{start}; {what}"
    )


def by_table(rows) -> list[list[dict]]:
    """Return the rows of each table, in order of appearance."""
    found: dict = {}
    for row in rows:
        key = (
            row.get("launch"),
            row["case"],
            row["axis"],
            row["mode"],
            row["buffers"],
            row["sync"],
            tuple(row["ranks"]),
            row["window"],
        )
        found.setdefault(key, []).append(row)
    return list(found.values())


def matrix(rows, value: str) -> str:
    """Return a number for each pair of ranks: rows and columns are world ranks."""
    pairs = {tuple(row["ranks"]): row[value] for row in rows}
    names = sorted({number for pair in pairs for number in pair})
    return results.text_table(
        [
            {"rank": low}
            | {
                high: digits(pairs[pair])
                if (pair := (min(low, high), max(low, high))) in pairs
                else "-"
                for high in names
            }
            for low in names
        ]
    )


def narrow(row: dict) -> dict:
    """Return the row without its samples, with plain values in every cell."""
    return {
        name: "+".join(map(str, value)) if isinstance(value, list) else value
        for name, value in row.items()
        if name not in records.SAMPLES
    }


def as_csv(rows) -> str:
    """Return one line for each row, with every column but the samples."""
    plain = [narrow(row) for row in rows]
    columns = list(dict.fromkeys(name for row in plain for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue().rstrip("\n")


def as_markdown(rows) -> str:
    """Return the text table's columns as Markdown, all rows in one table."""
    lines = [
        {
            "case": row["case"],
            "ranks": "+".join(map(str, row["ranks"])),
            "mode": row["mode"],
            **cells(row),
        }
        for row in rows
    ]
    names = dict.fromkeys(name for line in lines for name in line if name)
    return results.markdown_table([{name: line.get(name, "") for name in names} for line in lines])


def as_text(rows) -> str:
    """Return the text of every table with its title; several launches share one table."""
    if len({row.get("launch") for row in rows}) > 1:
        rows = [
            {name: value for name, value in row.items() if name != "launch"}
            for row in combined(rows)
        ]
    return "\n\n".join(f"{title(rows[0])}\n{text(rows)}" for rows in by_table(rows))


def as_osu(rows) -> str:
    """Return the columns of OSU 7.5 with its option for tails: size, mean, percentiles of times.

    OSU averages over iterations and ranks; here the mean is over the iterations' times.
    """
    blocks = []
    for some in by_table(rows):
        for via in dict.fromkeys(row["via"] for row in some):
            lines = []
            for row in sorted(
                (row for row in some if row["via"] == via), key=lambda row: row["size_bytes"]
            ):
                times = times_us(row)
                values = (times.mean(), *np.percentile(times, TAILS))
                lines.append(
                    {"# Size": row["size_bytes"]}
                    | {
                        name: f"{value:.2f}"
                        for name, value in zip(OSU_COLUMNS, values, strict=True)
                    }
                )
            blocks.append(f"# mpipar {some[0]['case']}, {via}\n{results.text_table(lines)}")
    return "\n\n".join(blocks)


FORMATS = {"text": as_text, "csv": as_csv, "markdown": as_markdown, "osu": as_osu}


def add_flags(parser) -> None:
    """Add the flags for the files, and the output format."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of bench.interconnect --json")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text")


def show(args, session) -> int:
    """Print a file's rows; a file can be printed again at any time."""
    rows = records.rows_of(args.files, tell=True)
    if not rows:
        print("no rows", file=sys.stderr)
        return EXIT_OK
    print(FORMATS[args.format](rows))
    return EXIT_OK


main = Program("table", __doc__, show, json=None, add=add_flags).started(__name__)
