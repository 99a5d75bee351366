"""`mpipar verify`, a proof for any user: yes if all is well, and no otherwise."""

import functools
import re
import sys

import gpt2_reference as gpt2
import numpy as np
import pytest
from helpers import run_ranks
from in_process import alone, printed
from one_rank import fresh
from program import LIMIT, cells, environment, layout_flags, mpipar, section

from mpipar.config.grid import GridConfig
from mpipar.config.sections import Config
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.verify import serial_config
from mpipar.train.build import configured_schedule

SMALL = """--layers 3 --d-model 12 --heads 6 --ffn 31 --seq-len 5 --batch-size 8
    --num-microbatches 2""".split()
# One function replaced: the result of one barrier is thrown away.
BROKEN = """
import sys
from mpipar import cli
from mpipar.comm import group as comm
from mpipar.run.process import session as launch
plain = comm.Comm.all_reduce
def all_reduce(self, x, name, op="sum"):
    return x if name == "block1.ffn.up" else plain(self, x, name, op)
comm.Comm.all_reduce = all_reduce
launch.guard(cli.main, sys.argv[1:])
"""


@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (2, 1, 2), pytest.param((1, 1, 3), marks=pytest.mark.slow)], ids=str
)
def test_says_yes(layout, tmp_path):
    """In float64 and by plain SGD, whatever the flags say; and no file stays."""
    dp, pp, tp = layout
    words = [
        "verify",
        "--all",
        *SMALL,
        *layout_flags(layout),
        "--dtype",
        "float32",
        "--optimizer",
        "adamw",
    ]
    ranks = dp * pp * tp
    start = functools.partial(mpipar, ranks=ranks) if ranks > 1 else alone
    result = start(*words, cwd=tmp_path).ended()
    assert list(tmp_path.iterdir()) == []
    assert f"dp {dp} x pp {pp} x tp {tp}, schedule 1f1b, 2 microbatches" in result.stdout
    rows = [cells(line) for line in section(result.stdout, "tensor")]
    names = [row[0] for row in rows]
    assert names[0] == "loss and gradient norm"
    tensors = 3 * 12 + 4  # of each block, both tables, the final norm
    assert len(set(names)) == 1 + tensors
    for kind in ("gradient", "weight"):
        assert sum(row[1] == kind for row in rows) == tensors
    assert all(row[-1] == "ok" and float(row[2]) <= 1e-12 for row in rows)
    assert result.stdout.startswith(f"{1 + 2 * tensors} of {1 + 2 * tensors} agree to 1e-12")


def test_the_settings_of_a_run_are_taken(tmp_path):
    """Its flags of AdamW and of float16 do not belong to the step of SGD in float64."""
    (tmp_path / "config.toml").write_text('dtype = "float16"\nloss-scale = 1024\nbeta1 = 0.8\n')
    result = alone("verify", *SMALL, "--config", "config.toml", cwd=tmp_path).ended()
    assert re.match(r"(\d+) of \1 agree to 1e-12", result.stdout)


def test_rows_shorter_than_a_table_of_positions(tmp_path):
    shape = {"layers": 2, "D": 12, "F": 20, "T": 6, "V": 256, "tied": True}
    tensors = gpt2.random_weights(np.random.default_rng(1), **shape)
    gpt2.write_model(tmp_path / "gpt2", tensors, gpt2.configuration(heads=2, **shape))
    words = ["--all", "--init-from", tmp_path / "gpt2", "--seq-len", "4"]
    words += ["--layout", "tp=2,cp=2", "--zero", "3"]
    result = mpipar("verify", *words, ranks=4).ended()
    assert re.match(r"(\d+) of \1 agree to 1e-12", result.stdout)
    assert "embedding.positions" in result.stdout


def test_says_no_and_where():
    command = [sys.executable, "-c", BROKEN, "verify", *SMALL, "--tp", "2", "--dp", "1"]
    result = run_ranks(2, command, LIMIT, environment()).ended(1)
    rows = [cells(line) for line in section(result.stdout, "tensor")]
    bad = {row[0] for row in rows if row[-1] == "DIFFERS"}
    assert "block1.norm2.w" in bad, "its gradient comes straight from the broken sum"
    assert "block2.ffn.up.w" not in bad, "nothing above the broken barrier is wrong"
    assert re.search(r"\d+ of 81 agree.*; \d+ DIFFER", result.stdout)


def test_a_schedule_from_a_file_or_with_chunks_is_none_of_the_one_rank_s(tmp_path):
    path = tmp_path / "order.csv"
    printed("schedule", "1f1b", "--pp", 2, "--num-microbatches", 2, "--csv", path)
    result = mpipar("verify", *SMALL, "--pp", 2, "--schedule-csv", path, ranks=2).ended()
    assert f"x tp 1, schedule {path}, 2 microbatches" in result.stdout
    grid = GridConfig(schedule="interleaved", pp=2, num_microbatches=4)
    assert configured_schedule(serial_config(Config(grid=grid)).grid).pp_size == 1


def test_takes_the_weights_that_it_is_given(tmp_path):
    """In a trained model no bias is zero, and each of them counts."""
    worker = fresh(vocab_size=256, ffn=21)
    rng = np.random.default_rng(7)
    for param in worker.stages[0].params:
        param.data += 0.1 * rng.standard_normal(param.data.shape)
    checkpoint.save(worker, tmp_path)
    words = ["verify", "--init-from", tmp_path, "--batch-size", "4", "--num-microbatches", "1"]
    given = mpipar(*words, "--tp", "3", ranks=3).ended()
    shape = ["--layers", "2", "--d-model", "12", "--heads", "3", "--ffn", "21", "--seq-len", "6"]
    random = mpipar("verify", *shape, *words[3:], "--tp", "3", ranks=3)
    assert given.stdout.split("tensor")[0] == random.stdout.split("tensor")[0]
    assert section(given.stdout, "tensor") != section(random.stdout, "tensor")
