"""Runs of ten steps of a tiny model: whole, ended too early, and compared bit by bit."""

import functools

from helpers import run_command, run_ranks
from in_process import alone
from program import FAULTY, LETTERS, LIMIT, environment, metrics, mpipar

from mpipar.run.checkpoint.manifest import read_manifest

TINY = """--data text.txt --layers 2 --d-model 8 --heads 2 --ffn 12 --seq-len 5 --batch-size 4
    --num-microbatches 2 --sample-tokens 4 --steps 10 --warmup-steps 2 --log-interval 4""".split()


TIMES = {"step_seconds", "tokens_per_second", "comm_share_mean", "comm_share_max"}


def prepare(folder):
    """Write the text."""
    (folder / "text.txt").write_text(LETTERS)


def train(here, *words, ranks=None, code=0):
    """Train in a folder; return what was printed. The run must end with this code."""
    start = functools.partial(mpipar, ranks=ranks) if ranks else alone
    result = start("train", *words, cwd=here).ended(code)
    return result.stdout + result.stderr


def ended(here, how, number, *words, ranks=None):
    """A run that faulty_run.py ends too early."""
    argv = [*FAULTY, f"{how}@{number}", "train", *map(str, words)]
    if ranks is None:
        return run_command(argv, LIMIT, environment(), here)
    return run_ranks(ranks, argv, LIMIT, environment(), here)


def without_times(folder):
    """The lines of metrics.jsonl, without what a clock has measured."""
    return [
        {
            name: (
                {
                    axis: {"calls": one["calls"], "bytes": one["bytes"]}
                    for axis, one in value.items()
                }
                if name == "comm"
                else value
            )
            for name, value in line.items()
            if name not in TIMES
        }
        for line in metrics(folder)
    ]


def state(folder, step):
    """{file: digest} and the loss scale of a checkpoint."""
    manifest = read_manifest(folder / "checkpoints" / f"step-{step:08d}")
    return manifest.files, manifest.loss_scale


def assert_same_run(one, other, step=10):
    """Assert that two runs have the same metrics, weights and last state, bit by bit."""
    assert without_times(one) == without_times(other)
    assert [line["step"] for line in metrics(one)] == list(range(1, step + 1))
    name = "weights/model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()
    assert state(one, step) == state(other, step)
    assert (one / "result.json").read_text() == (other / "result.json").read_text()
