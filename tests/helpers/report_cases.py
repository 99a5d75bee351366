"""The files of a run folder as a run writes them, for the tests of report.html and metrics.csv."""

import json
import math
import re

from config_helpers import reading_of

from mpipar.config.resolve import resolve


def lines_of(steps, **more):
    """Lines of metrics.jsonl of a run that learns."""
    return [
        {
            "step": step,
            "loss": 5 / math.sqrt(step),
            "grad_norm": 1 + 1 / step,
            "lr": 1e-3 * step,
            "step_seconds": 0.25,
            "tokens_per_second": 4096.0 + step,
            "comm_share_mean": 0.25,
            "comm_share_max": 0.5,
            "comm": {
                "tp": {"calls": 8, "bytes": 4096, "seconds_mean": 0.0625, "seconds_max": 0.125}
            },
        }
        | more
        for step in range(1, steps + 1)
    ]


def run_folder(folder, steps=40, name="run", log="a line\n", evaluations=True):
    """A run folder with these many steps and, if wanted, an evaluation after every tenth."""
    path = folder / name
    path.mkdir()
    held_out = [
        {"step": step, "held_out_loss": 6 / math.sqrt(step), "tokens": 64, "seconds": 0.5}
        for step in range(10, steps + 1, 10)
        if evaluations
    ]
    for file, lines in (("metrics.jsonl", lines_of(steps)), ("evaluations.jsonl", held_out)):
        (path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "log.txt").write_text(log)
    return path


def config_of(*words, ranks=1):
    return resolve(reading_of(*words).config, ranks)[0]


def told(**changes):
    """What no file of the folder says."""
    rank = {
        "rank": 0,
        "host": "vm",
        "place": "one rank",
        "stages": ["0: all"],
        "share": "all",
        "params": 1000,
        "memory": {"weights": 4000},
    }
    return {
        "state": "ended after step 40",
        "headline": "1 rank on 1 host\nmodel tiny",
        "environment": [("command", "mpipar train")],
        "ranks": [rank],
        "traced": False,
        "barriers": "",
    } | changes


def data_of(page):
    """The data of a page, as a browser finds them: up to the first end of a script."""
    start, data = re.search(
        r'(.*<script type="application/json" id="data">)(.*?)</script>', page, re.DOTALL
    ).groups()
    assert "<!--" not in data, "behind it a browser passes over the end of the script"
    assert start.count("<script") == 1
    return json.loads(data)
