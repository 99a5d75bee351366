"""Short runs of a tiny model: whole, ended too early, compared bit by bit, and traced."""

import functools
import json

from helpers import run_command, run_ranks
from in_process import alone
from program import FAULTY, LETTERS, LIMIT, TEXT, environment, metrics, mpipar

from mpipar.run.checkpoint.manifest import read_manifest
from mpipar.run.trace import trace_file

TINY = """--data text.txt --layers 2 --d-model 8 --heads 2 --ffn 12 --seq-len 5 --batch-size 4
    --num-microbatches 2 --sample-tokens 4 --steps 10 --warmup-steps 2 --log-interval 4""".split()


OFTEN = "--eval-interval 3 --eval-tokens 40".split()
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


# --- traced runs under mpiexec, with a fault planted


# The text is short: its held-out part is evaluated in rows of 8 tokens.
TRACED = f"""--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 2
    --steps 6 --sample-tokens 0 {" ".join(TEXT)}""".split()


def traced(folder, *words, fault="none", ranks=2):
    """The Trace of a run of `train` under a fault of faulty_run.py."""
    command = [*FAULTY, fault, "train", *words, "--out", str(folder)]
    run_ranks(ranks, command, 100, environment()).ended()
    return trace_file.read(folder)


# By fault: the words of its cause.
FAULTS = {
    "data": "data loading",
    "opt": "optimizer",
    "save": "checkpoint save",
    "between": "between spans (Python, posting, logging)",
    "gc": "garbage collection",
    "F": "forward of stage {stage}, {layer}",
    "B": "backward of stage {stage}, {layer}",
}


def evaluations(folder):
    """The lines of evaluations.jsonl, without times."""
    lines = map(json.loads, (folder / "evaluations.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
