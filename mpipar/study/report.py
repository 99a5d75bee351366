"""report.html and metrics.csv: a run's results for a reader, made from the files in its folder.

Both are rewritten whenever a run ends or stops, so a resumed run extends them.
"""

import datetime as dt
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mpipar.config.sections import Config, settings
from mpipar.config.setting import flag
from mpipar.config.text import counted
from mpipar.errors import UserError
from mpipar.run.console import tables
from mpipar.run.console.metrics import read_lines
from mpipar.run.console.tables import describe_model
from mpipar.run.files.bounded import open_regular
from mpipar.run.files.no_links import replace_file
from mpipar.run.folder import CSV, EVALUATIONS, LOG, METRICS, REPORT
from mpipar.run.process import consistency, mpi
from mpipar.run.process.environment import processor
from mpipar.run.trace import trace_file
from mpipar.study.trace import html
from mpipar.study.trace.analysis import Analysis

MOST_LOG = 200_000  # bytes of log.txt on the page


def environment(session) -> list[tuple[str, str]]:
    """Return where and how the run was started, as (name, value); called on world rank 0."""
    return [
        ("command", f"mpipar {shlex.join(sys.argv[1:])}"),
        ("started", dt.datetime.now().astimezone().isoformat(" ", "seconds")),
        ("launcher", session.launcher.name or "none (one process)"),
        ("MPI", mpi.library_name(session.world)),
        *((name, session.facts[name]) for name in consistency.PROGRAMS),
        ("processor", processor()[0] or platform.machine()),
        ("system", f"{platform.system()} {platform.release()}"),
    ]


def write(folder: Path, config: Config, told: dict, log: Callable[[str], None]) -> None:
    """Write both files, and print the barriers; a failure is logged and does not stop the run.

    told: what no file in the folder has: `state`, `headline`, `environment`, `ranks` (facts of
    each), `traced`, and `barriers`, a table for a run without a trace. Called on world rank 0 only.
    """
    try:
        (lines, damaged), (evaluations, more) = (
            read_lines(folder, name) for name in (METRICS, EVALUATIONS)
        )
        if damaged or more:
            log(
                f"{REPORT} and {CSV} are without {counted(damaged + more, 'damaged line')} of"
                f" {METRICS} and {EVALUATIONS}"
            )
        replace_file(CSV, [csv_text(lines, evaluations).encode()], root=folder)
        traced = trace_data(folder, log) if told["traced"] else {}
        page = traced | run_data(folder, config, lines, evaluations, told)
        if cells := page.get("barriers"):
            title = "barriers of a traced step, in ms over all ranks, and how often one was last:"
            barriers = tables.table(cells, left=2)
        else:
            title = "barriers of a step, by name (calls and bytes summed over ranks):"
            barriers = told["barriers"]
        if barriers:
            log(f"{title}\n{barriers}\n")
        replace_file(REPORT, [html.build(page).encode()], root=folder)
        words = ", and who waited for whom" if traced else ""
        log(f"{REPORT} shows the run{words}; open it in a browser")
    except Exception as error:  # noqa: BLE001 - the run is worth more than its report
        reason = error.strerror if isinstance(error, OSError) else None
        log(f"no {REPORT}: {reason or error}")


def trace_data(folder: Path, log) -> dict:
    """Return the trace's data for the page; {} if it cannot be read."""
    try:
        trace = trace_file.read(folder)
        with trace_file.contradictions_are_data_errors(folder):
            return html.page_data(Analysis(trace))
    except UserError as error:  # as when hosts share no file system; the run itself is fine
        log(f"{REPORT} is without the trace: {error}")
        return {}


def run_data(folder: Path, config: Config, lines, evaluations, told: dict) -> dict:
    """Return what the page shows for every run, as values for JSON."""
    return {
        "title": f"{folder.resolve().name}: {tables.layout_text(config.grid)},"
        f" {config.grid.schedule_csv or config.grid.schedule}",
        "model": f"{describe_model(config.model)};"
        f" {config.train.optimizer}, {config.run.dtype} on {config.run.device}",
        "state": told["state"],
        "summary": summary(lines, evaluations),
        "curves": curves(lines, evaluations),
        "tables": [
            layout_table(told["ranks"], told["headline"].splitlines()[0]),
            {"title": "Environment", "rows": [list(row) for row in told["environment"]]},
            *configuration(config),
        ],
        "log": log_text(folder),
    }


def summary(lines, evaluations) -> list[list[str]]:
    """Return [name, value, description] of the most important figures."""
    found = []
    if evaluations:
        last = evaluations[-1]
        words = f"nats per token, after step {last['step']}"
        found.append(["held-out loss", f"{last['held_out_loss']:.4f}", words])
    if lines:
        newest = [one["loss"] for one in lines[-20:]]
        words = f"nats per token, mean of the last {counted(len(newest), 'step')}"
        found.append(["training loss", f"{sum(newest) / len(newest):.4f}", words])
        speed = median(one["tokens_per_second"] for one in lines)
        found.append(["speed", tables.short_count(speed), "tokens per second, median step"])
        share = sum(one["comm_share_mean"] for one in lines) / len(lines)
        found.append(["time in barriers", f"{share:.0%}", "of a step, mean over ranks"])
    return found


def layout_table(ranks: list[dict], head: str) -> dict:
    """Return a table of what each rank holds, and its memory."""
    columns, *rows = [list(map(str, row)) for row in tables.holding_rows(ranks)]
    return {"title": "Layout", "words": head, "head": columns, "rows": rows}


def configuration(config: Config) -> list[dict]:
    """Return a table of settings per section, without those that are not set."""
    found: dict[str, list] = {}
    for section, field, value in settings(config):
        if value is not None and value != ():
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found.setdefault(section, []).append([flag(field.name)[2:], text])
    return [{"title": f"Configuration: {section}", "rows": rows} for section, rows in found.items()]


def log_text(folder: Path) -> str:
    """Return the end of log.txt, which holds everything the run has printed."""
    try:
        with open_regular(LOG, folder) as file:
            cut = max(0, os.fstat(file.fileno()).st_size - MOST_LOG)
            file.seek(cut)
            text = file.read(MOST_LOG).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return f"[{cut:,} earlier bytes are in {LOG}]\n{text}" if cut else text


def csv_text(lines: list[dict], evaluations: list[dict]) -> str:
    """Return one line per step, with units in the column names; unknown values are empty.

    Bytes and calls are per step, summed over ranks; seconds_mean and seconds_max are the mean and
    maximum over ranks.
    """
    held_out, rows = {one["step"]: one["held_out_loss"] for one in evaluations}, []
    for line in lines:
        step, loss = line["step"], line["loss"]
        row = {"step": step, "loss_nats": loss, "held_out_loss_nats": held_out.get(step)}
        row |= {name: value for name, value in line.items() if name not in ("loss", "comm")}
        for axis, own in line["comm"].items():
            row |= {f"comm_{axis}_{part}": value for part, value in own.items()}
        rows.append(row)
    return tables.csv_text(rows)


# --- curves by step, of a run's lines


MOST_POINTS = 1000  # of a drawn curve; longer ones are drawn as means


def curves(lines: list[dict], evaluations: list[dict]) -> list[dict]:
    """Return what a page draws: [{title, unit, series: [{name, colour, points: [[step, value]]}]}].

    Curves without values are left out.
    """
    wanted = [
        (
            "Loss",
            "nats per token",
            [
                ("training", "F", _points(lines, "loss")),
                ("held out", "W", _points(evaluations, "held_out_loss")),
            ],
        ),
        ("Learning rate", "", [("learning rate", "data", _points(lines, "lr"))]),
        ("Gradient norm", "before clipping", [("norm", "opt", _points(lines, "grad_norm"))]),
        ("Speed", "tokens per second", [("speed", "B", _points(lines, "tokens_per_second"))]),
        (
            "Time in barriers",
            "share of a step",
            [("share", "axis-tp", _points(lines, "comm_share_mean"))],
        ),
    ]
    found = []
    for title, words, series in wanted:
        some = [
            {"name": name, "colour": colour, "points": thinned(points)}
            for name, colour, points in series
            if any(value for _, value in points)
        ]
        if some:
            found.append({"title": title, "unit": words, "series": some})
    return found


def _points(lines: list[dict], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def thinned(points: list[tuple[int, float]]) -> list[list]:
    """Return at most MOST_POINTS points: means of equally many neighbours, at the last's step."""
    each = -(-len(points) // MOST_POINTS) or 1
    parts = [points[first : first + each] for first in range(0, len(points), each)]
    return [[part[-1][0], sum(value for _, value in part) / len(part)] for part in parts]
