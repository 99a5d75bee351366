"""bench.matmul: its table, its file; it does not time a cut whose results are wrong."""

import json
import sys

import pytest
from helpers import run_ranks

from bench import tiles
from bench.matmul import __main__ as matmul
from bench.matmul.cut_product import cases, shown
from bench.step import __main__ as step
from mpipar.errors import UsageError
from mpipar.partition import MESH_CUTS

SIZES = "--tokens 21 --inner 10 --outer 13 --repeats 2 --dtype float64".split()
WRONG = """
import sys
from bench.matmul import __main__ as matmul
from mpipar.comm.group import Comm
from mpipar.job.session import guard
Comm.reduce_scatter = lambda self, x, name: x[self.index]
guard(matmul.main)
"""


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_every_cut_is_measured_and_rows_of_other_ranks_stay(tmp_path):
    path = tmp_path / "matmul.json"
    for num_ranks in (2, 4, 4):
        done = run_ranks(num_ranks, [sys.executable, "-m", "bench.matmul", *SIZES, "--json", path],
                         timeout=100)
        assert done.returncode == 0, done.tail()
    found = [(row["ranks"], row["cut"], row["grid"]) for row in rows_of(path)]
    one_axis = "column row gather reduce column_sp row_sp column_ring row_ring".split()
    assert found == [
        *((2, cut, "2") for cut in one_axis), (2, "2.5d", "1 x 1 x 2"),
        *((4, cut, "4") for cut in one_axis), (4, "2d", "2 x 2"), (4, "2.5d", "1 x 1 x 4"),
    ]
    for row in rows_of(path):
        assert row["median_ms"] >= row["best_ms"] > 0
        assert 0 < row["in_communication"] < 1
        assert (row["hidden"] == "-") != row["cut"].endswith("ring")
    # A ring sends what the collectives send; two numbers of ranks share the blocks differently.
    sent = {(row["ranks"], row["cut"]): row["sent_MiB"] for row in rows_of(path)}
    assert sent[2, "column_ring"] == sent[2, "column_sp"] > 0
    assert sent[4, "row_ring"] == sent[4, "row_sp"] > 0


def test_every_number_of_ranks_has_its_square_grids():
    grids = {number: [shown(*case) for case in cases(number) if case[0] in MESH_CUTS]
             for number in (1, 5, 8, 9, 12)}
    assert grids == {1: ["1 x 1"], 5: ["1 x 1 x 5"], 8: ["2 x 2 x 2", "1 x 1 x 8"],
                     9: ["3 x 3", "1 x 1 x 9"], 12: ["2 x 2 x 3", "1 x 1 x 12"]}


def test_a_wrong_cut_is_not_timed():
    done = run_ranks(2, [sys.executable, "-c", WRONG, *SIZES], timeout=100)
    assert done.returncode == 1, done.tail()
    assert "column_sp on grid 2, rank 0: dx is off by" in done.stdout
    assert "median_ms" not in done.stdout


@pytest.mark.parametrize("parse", [matmul.main.parse, step.parse, tiles.main.parse])
@pytest.mark.parametrize("number", ["0", "-3", "x", "1.5"])
def test_a_size_is_a_whole_number_above_zero(parse, number, capsys):
    with pytest.raises((UsageError, SystemExit)) as caught:
        parse(["--repeats", number])
    said = str(caught.value) + capsys.readouterr().err
    assert f"argument --repeats: '{number}': must be a whole number above 0" in said
