"""The schedule explorer: its orders as data, what it is filled with, and refusals."""

import base64
import json
import re
import zlib

import pytest
from in_process import assert_refused, printed
from trace_cases import pipeline_trace

from mpipar.errors import UsageError
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.instructions import is_compute
from mpipar.pipeline.schedules.catalog import FAMILIES, make_schedule
from mpipar.run.trace import trace_file
from mpipar.study.schedules import explorer


def parts_of(page):
    """(data, orders) of a page."""
    data, orders = (
        re.search(rf'id="{name}">(.*?)</script>', page)[1] for name in ("data", "orders")
    )
    return json.loads(data), json.loads(zlib.decompress(base64.b64decode(orders)))


def few_orders(monkeypatch):
    """Let the page hold the orders of a few counts alone: making them all takes seconds."""
    monkeypatch.setattr(explorer, "RANKS", (2, 4))
    monkeypatch.setattr(explorer, "MICROBATCHES", (4, 8))
    known = explorer.known_orders
    monkeypatch.setattr(explorer, "known_orders", lambda: known((2, 4), (4, 8)))


def test_the_orders_are_those_of_the_catalog():
    known = explorer.known_orders((3, 4), (5, 8))
    for key, orders in known.items():
        name, p, m, chunks = key.split()
        if isinstance(orders, str):
            assert name == "dualpipe-v"
            with pytest.raises(UsageError, match=re.escape(orders.split(";")[0])):
                make_schedule(name, int(p), int(m), int(chunks))
            continue
        programs = make_schedule(name, int(p), int(m), int(chunks)).programs
        assert [[parse_instruction(text) for text in row.split()] for row in orders] == [
            [instr for instr in program if is_compute(instr)] for program in programs
        ]
    assert {key.split()[0] for key in known} == set(FAMILIES)
    assert sum(key.startswith("interleaved ") for key in known) == 2 * 2 * 3


def test_the_page_begins_with_what_the_command_line_says(monkeypatch, tmp_path):
    few_orders(monkeypatch)
    path = tmp_path / "page.html"
    text = printed(
        "schedule", "zb-v", "--pp", 2, "--costs", "2,1,1/2", "--latency", "1/4", "--html", path
    )
    assert text == f"{path}: open it in a browser\n"
    page = path.read_text()
    data, orders = parts_of(page)
    assert data["start"] == {
        "first": "zb-v",
        "second": "zb-h1",
        "p": 2,
        "m": 8,
        "chunks": 2,
        "share": "worker",
        "overlap": 1,
        "f": 2,
        "i": 1,
        "w": 0.5,
        "hop": 0.25,
    }
    assert data["own"] is None
    assert len(orders["zb-v 2 8 2"]) == 2
    assert not re.search(r"\[\[[A-Z]+\]\]", page), "every part is filled in"
    assert "<title>zb-v, one step</title>" in page, "a reader without JavaScript sees a drawing"


def test_other_counts_and_files_are_put_beside_the_orders(monkeypatch, tmp_path):
    few_orders(monkeypatch)
    path, table = tmp_path / "page.html", tmp_path / "own.csv"
    printed("schedule", "1f1b", "--pp", 9, "--html", path)
    data, _ = parts_of(path.read_text())
    assert (data["start"]["first"], data["start"]["second"]) == ("own", "")
    assert len(data["own"]["schedule"]["programs"]) == 9
    printed("schedule", "dualpipe-v", "--pp", 2, "--csv", table)
    printed("schedule", "--from-csv", table, "--html", path)
    data, _ = parts_of(path.read_text())
    assert data["own"]["title"] == "own.csv, 2 workers"
    assert data["own"]["schedule"]["stageToRank"] == [0, 1, 1, 0]


def test_costs_and_passes_of_a_run_fill_the_page(monkeypatch, tmp_path):
    few_orders(monkeypatch)
    traced = pipeline_trace("zb-h1", 4, 8)
    for rank in traced.ranks:
        rank.host, rank.cores = "here", (0, 1)
    monkeypatch.setattr(trace_file, "read", lambda folder: traced)
    path = tmp_path / "page.html"
    printed("schedule", "--from-run", tmp_path / "runs" / "7", "--html", path)
    data, _ = parts_of(path.read_text())
    start, measured = data["start"], data["measured"]
    assert (data["title"], data["unit"]) == ("Pipeline schedules: 7", " ms")
    assert (start["first"], start["second"], start["f"], start["hop"]) == ("own", "measured", 10, 0)
    assert data["own"]["title"] == "zb-h1 of 7"
    assert measured["costs"] == {name: pytest.approx([10] * 4) for name in "fiw"}
    assert "\nhere: 4 ranks share 2 core(s), so ranks" in measured["words"]
    assert measured["passes"][0][0] == [0, 10, "0F0"]
    assert [len(own) for own in measured["passes"]] == [24] * 4


@pytest.mark.parametrize(("flags", "message"), [
    (["--compare", "--json"], "--html writes one page and nothing else: leave --compare and"),
    (["dualpipe-v", "--pp", "5"], "two streams that cross need at least 2 pp microbatches"),
    (["1f1b", "--pp", "64", "--num-microbatches", "128"], "--html draws at most 4,096 forward"),
    (["--from-run", "run", "1f1b", "--costs", "1,1,1"], "leave NAME and --costs out"),
    (["--from-csv", "a.csv", "--chunks", "2"], "--from-csv brings its own schedule: leave"),
    (["--costs", "1,1"], "use three numbers F,I,W"),
])  # fmt: skip
def test_mistakes_are_said(flags, message, tmp_path):
    assert_refused(2, [message], "schedule", *flags, "--html", tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_run_needs_a_trace_a_pipeline_and_a_page(monkeypatch, tmp_path):
    assert_refused(2, ["add --html FILE"], "schedule", "--from-run", tmp_path)
    assert_refused(65, ["--trace"], "schedule", "--from-run", tmp_path, "--html", "page.html")
    monkeypatch.setattr(trace_file, "read", lambda folder: pipeline_trace("gpipe", 1, 4))
    assert_refused(
        2, ["has one pipeline rank"], "schedule", "--from-run", tmp_path, "--html", "page.html"
    )


def test_a_file_with_messages_is_refused(tmp_path):
    table = tmp_path / "wired.csv"
    printed("schedule", "1f1b", "--pp", 2, "--csv", table, "--csv-format", "compute_comms")
    assert_refused(
        2,
        ["--csv-format compute_only"],
        "schedule",
        "--from-csv",
        table,
        "--html",
        tmp_path / "page.html",
    )
