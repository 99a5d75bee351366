"""`mpipar schedule` and its explorer: figures against closed forms, files, orders, mistakes."""

import base64
import json
import re
import subprocess
import sys
import zlib

import pytest
from in_process import assert_refused, at_once, printed
from trace_cases import pipeline_trace

from mpipar import cli
from mpipar.commands import schedule as command
from mpipar.errors import OutputError, UsageError
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.instructions import is_compute
from mpipar.pipeline.schedules.catalog import FAMILIES, SCHEDULES, make_schedule
from mpipar.run.trace import trace_file
from mpipar.study.schedules import draw, explorer
from mpipar.study.schedules.simulate import Costs, simulate


def run(words, capsys):
    assert command.run(cli.context_of(None, "schedule", words.split())) == 0
    return capsys.readouterr().out


def test_the_textbook_picture():
    assert draw.grid(simulate(make_schedule("1f1b", 3, 4), Costs())) == "\n".join(
        [
            "time     0              5              10             15",
            "worker 0 F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---",
            "worker 1 .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .",
            "worker 2 .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .",
        ]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_and_json(name, capsys):
    found = json.loads(run(f"{name} --pp 4 --num-microbatches 8 --costs 2,2,1 --json", capsys))
    timeline = simulate(make_schedule(name, 4, 8), Costs(2, 2, 1))
    assert found["makespan"] == timeline.makespan
    assert found["messages"] == list(timeline.messages)
    assert found["peak_stash"] == list(timeline.peak_stash)
    assert found["workers"][1] == [[str(instr), s, e] for instr, s, e in timeline.spans[1]]
    assert found["closed_form"]["messages"]["value"] == sum(timeline.messages)


def test_costs_and_latency(capsys):
    words = "gpipe --pp 2 --num-microbatches 3 --costs 1/2,1,0.5 --latency 0.25 --json"
    assert json.loads(run(words, capsys))["makespan"] == (3 + 1) * 2 + 2 * 0.25
    found = json.loads(run("dualpipe-v --costs 1,1,1,2 --json", capsys))
    timeline = simulate(make_schedule("dualpipe-v", 4, 8), Costs(overlap=2 / 3))
    assert found["makespan"] == timeline.makespan


def test_compare(capsys):
    text = run("--compare --pp 4 --num-microbatches 8", capsys)
    assert "proved: every pass once" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert set(SCHEDULES) <= set(rows)
    assert rows["naive"] == ["naive", "4", "96", "75.0", "%", "1.00", "x", "1", "48"]
    assert rows["1f1b"] == ["1f1b", "4", "33", "27.3", "%", "2.91", "x", "4", "48"]
    assert rows["interleaved"][1:3] == ["8", "28.5"]
    assert rows["zb-v"][1:4] == ["8", "25.5", "5.9"]
    text = run("--compare --pp 3 --num-microbatches 5 --chunks 3", capsys)
    assert "--schedule dualpipe-v with --pp 3" in text
    assert "looped-bfs 9" in " ".join(text.split())


def test_csv_in_both_directions(tmp_path, capsys):
    path = tmp_path / "order.csv"
    before = run(f"v-half --pp 3 --num-microbatches 4 --csv {path}", capsys)
    after = run(f"--from-csv {path}", capsys)
    assert after.splitlines()[0].startswith("order.csv: 3 workers, 6 stages, 4 microbatches")
    panel = slice(3, 7)
    assert after.splitlines()[panel] == before.splitlines()[panel]
    assert run("v-half --pp 3 --num-microbatches 4 --csv -", capsys) == path.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["which schedule?", "zb-h1"]),
        ("1f1", ["did you mean 1f1b?"]),
        ("1f1b --json --csv -", ["--json and --csv - both print"]),
        (
            "dualpipe-v --pp 5 --costs 1,x --latency -1",
            [
                "--costs 1,x: use three numbers",
                "--latency -1: use a number",
                "--schedule dualpipe-v with --pp 5",
            ],
        ),
        ("zb-h1 --book", ["--book: zb-h1 has the passes I, W"]),
        ("1f1b --book --symbols", ["--book and --symbols: give one"]),
        ("--compare --book", ["leave --book out"]),
        ("1f1b --costs 1,1", ["--costs 1,1: use three numbers"]),
        ("1f1b --costs 0,1,1", ["--costs 0,1,1: use three numbers"]),
        ("1f1b --costs 1,1/0,1", ["--costs 1,1/0,1: use three numbers"]),
        ("1f1b --chunks 2", ["leave --chunks out"]),
        ("--from-csv no.csv --compare --chunks 2", ["leave --compare and --chunks out"]),
        ("--compare --symbols --json --csv a.csv", ["leave --symbols and --json and --csv out"]),
        ("looped-bfs --group-size 4", ["--group-size: is gone; leave it out"]),
        ("--from-csv no.csv", ["cannot read no.csv"]),
        ("--compare --pp 0", ["--pp 0: must be at least 1"]),
        (f"gpipe --pp {10**30}", [f"--pp {10**30}: must be at most 4,096"]),
        ("gpipe --num-microbatches 1e3", ["--num-microbatches 1e3: must be a whole number"]),
        ("looped-bfs --chunks 9999", ["--chunks 9999: must be at most 1,024"]),
        ("v-min --pp 4096 --num-microbatches 65536", ["at most 262,144 forward passes"]),
        ("--compare --chunks 1024 --pp 9", ["--pp times --chunks times --num-microbatches may"]),
        ("zb-v --pp 4096 --num-microbatches 32 --html a.html", ["--html draws at most 4,096"]),
        (
            "--compare --json --html a.html",
            ["--html writes one page and nothing else: leave --compare and"],
        ),
        (
            "--from-run run 1f1b --costs 1,1,1 --html a.html",
            ["--from-run brings its own schedule and costs: leave NAME and --costs out"],
        ),
        ("--from-run run", ["add --html FILE"]),
    ],
)
def test_mistakes(words, expected, capsys):
    """In no time, however large a number is."""
    with at_once(5), pytest.raises(UsageError) as caught:
        run(words, capsys)
    for text in expected:
        assert text in str(caught.value)


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(OutputError, match=r"cannot write .*picture\.svg"):
        run(f"1f1b --svg {tmp_path}/none/picture.svg", capsys)


def test_the_program_needs_no_mpi():
    """The whole command in a fresh interpreter, from the command line to the grid."""
    code = (
        "import sys; sys.argv[1:] = ['schedule', 'zb-v']\n"
        "import runpy\n"
        "try: runpy.run_module('mpipar', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "worker 3 .   .   .   3F0 4F0 3F1" in done.stdout


# --- the schedule explorer: its orders as data, what it is filled with, and refusals


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
    data, orders = parts_of(path.read_text())
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


def test_a_run_needs_a_trace_and_a_pipeline(monkeypatch, tmp_path):
    words = "schedule", "--from-run", tmp_path, "--html", tmp_path / "page.html"
    assert_refused(65, ["--trace"], *words)
    monkeypatch.setattr(trace_file, "read", lambda folder: pipeline_trace("gpipe", 1, 4))
    assert_refused(2, ["has one pipeline rank"], *words)
