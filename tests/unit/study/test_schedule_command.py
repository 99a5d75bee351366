"""`mpipar schedule`: grid, symbols, figures compared with closed forms, files, mistakes."""

import json
import subprocess
import sys

import pytest

from mpipar import cli
from mpipar.commands import schedule as command
from mpipar.errors import OutputError, UsageError
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule
from mpipar.study.schedules import draw
from mpipar.study.schedules.costs import Costs
from mpipar.study.schedules.simulate import simulate


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
    found = json.loads(run(words, capsys))
    assert found["makespan"] == (3 + 1) * 2 + 2 * 0.25
    found = json.loads(run("dualpipe-v --costs 1,1,1,2 --json", capsys))
    timeline = simulate(make_schedule("dualpipe-v", 4, 8), Costs(overlap=2 / 3))
    assert found["makespan"] == timeline.makespan
    found = json.loads(run("interleaved --chunks 3 --json", capsys))
    assert found["num_stages"] == 12


def test_compare(capsys):
    text = run("--compare --pp 4 --num-microbatches 8", capsys)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert set(SCHEDULES) <= set(rows)
    assert rows["naive"] == ["naive", "4", "96", "75.0", "%", "1.00", "x", "1", "48"]
    assert rows["1f1b"] == ["1f1b", "4", "33", "27.3", "%", "2.91", "x", "4", "48"]
    assert rows["interleaved"][1:3] == ["8", "28.5"]
    assert rows["zb-v"][1:4] == ["8", "25.5", "5.9"]
    text = run("--compare --pp 3 --num-microbatches 5 --chunks 3", capsys)
    assert "--schedule dualpipe-v with --pp 3" in text
    assert "looped-bfs 9" in " ".join(text.split())


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_csv_in_both_directions(form, tmp_path, capsys):
    path = tmp_path / "order.csv"
    before = run(f"v-half --pp 3 --num-microbatches 4 --csv {path} --csv-format {form}", capsys)
    after = run(f"--from-csv {path}", capsys)
    assert after.splitlines()[0].startswith("order.csv: 3 workers, 6 stages, 4 microbatches")
    panel = slice(3, 7)
    assert after.splitlines()[panel] == before.splitlines()[panel]
    printed = run(f"v-half --pp 3 --num-microbatches 4 --csv - --csv-format {form}", capsys)
    assert printed.splitlines() == path.read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["which schedule?", "zb-h1"]),
        ("1f1", ["did you mean 1f1b?"]),
        ("1f1b --json --csv -", ["--json and --csv - both print"]),
        (
            "dualpipe-v --pp 5 --costs 1,x --latency -1",
            [
                "'x' is not a number",
                "--latency: -1 must be at least 0",
                "--schedule dualpipe-v with --pp 5",
            ],
        ),
        ("zb-h1 --book", ["--book: zb-h1 has the passes I, W"]),
        ("1f1b --book --symbols", ["--book and --symbols: give one"]),
        ("--compare --book", ["leave --book out"]),
        ("1f1b --costs 1,1", ["--costs 1,1: use three numbers"]),
        ("1f1b --costs 0,1,1", ["--costs: 0 must be more than 0"]),
        ("1f1b --costs 1,1/0,1", ["'1/0' is not a number"]),
        ("1f1b --chunks 2", ["leave --chunks out"]),
        ("1f1b --from-csv no.csv", ["leave NAME out"]),
        ("--from-csv no.csv --compare --chunks 2", ["leave --compare and --chunks out"]),
        ("--compare --symbols --json --csv a.csv", ["leave --symbols and --json and --csv out"]),
        ("gpipe --compare", ["leave NAME out"]),
        ("looped-bfs --group-size 4", ["--group-size: is gone; leave it out"]),
        ("--from-csv no.csv", ["cannot read no.csv"]),
        ("--compare --pp 0", ["--pp 0: must be at least 1"]),
    ],
)
def test_mistakes(words, expected, capsys):
    with pytest.raises(UsageError) as caught:
        run(words, capsys)
    assert caught.value.exit_code == 2
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
