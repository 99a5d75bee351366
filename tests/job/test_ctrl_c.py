"""Signals to `mpipar train`: the weights are saved, and all ranks end together, with one meaning.

The guard itself is tested in test_launch.py.
"""

import os
import re
import signal
import sys
import time

import numpy as np
import pytest
from fault_table import fault
from helpers import run_command
from in_process import alone
from program import BLOCK, FAULTY, LIMIT, PROGRAM, environment, metrics, running, weights

from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.process.signals import Interruptible, obeyed

QUICK = 30.0  # seconds from Ctrl-C to the end of all processes: a second, and much for the load
TINY = """train --data text.txt --layers 2 --d-model 9 --heads 3 --ffn 12 --seq-len 5
    --batch-size 6 --num-microbatches 2 --log-interval 3 --out run""".split()


@pytest.fixture(autouse=True)
def terminal():
    """Tests that run under nohup start their jobs as a terminal does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def started(folder, ranks, *words, program=PROGRAM):
    return running([*program, *TINY, *words], folder, ranks)


@pytest.mark.parametrize(
    ("ranks", "sign"),
    [
        (3, signal.SIGINT),
        (1, signal.SIGHUP),
        pytest.param(2, signal.SIGUSR1, marks=fault(27, "SIGUSR1 to the launcher", 75)),
    ],
)
def test_in_training_the_run_ends_with_its_weights(ranks, sign, text_folder):
    path = text_folder / "run" / "metrics.jsonl"
    with started(text_folder, ranks, "--steps", "1000000") as job:
        job.wait_until(lambda: path.exists() and path.read_text().count("\n") > 5)
        assert job.interrupt(sign, QUICK) == 75, job.output()
        text = job.output()
    assert BLOCK not in text
    last = re.search(r"stopped on request after step (\d+); checkpoint and weights", text)
    assert metrics(text_folder / "run")[-1]["step"] == int(last[1])
    assert all(np.isfinite(x).all() for x in weights(text_folder / "run").values())
    result = alone("generate", "run", "--prompt", "a", "--sample-tokens", "3", cwd=text_folder)
    assert result.returncode == 0, result.tail()


def test_after_training_the_weights_are_there_already(tmp_path):
    """Evaluation of a long text takes longer than the training; no trained weight is lost."""
    (tmp_path / "text.txt").write_text("a long text, again and again. " * 100_000)
    path = tmp_path / "run" / "weights" / "model.safetensors"
    with started(tmp_path, 2, "--steps", "2") as job:
        job.wait_until(path.exists)
        time.sleep(0.3)
        assert job.interrupt(limit=QUICK) == 75, job.output()
        text = job.output()
    assert "held-out loss" not in text
    assert text.count(BLOCK) <= 1
    assert "run/weights" in text, "where the weights are has to be said"
    assert len(metrics(tmp_path / "run")) == 2
    assert all(np.isfinite(x).all() for x in weights(tmp_path / "run").values())


def test_sigusr2_to_one_rank_saves_and_the_run_goes_on(text_folder):
    path, saved = text_folder / "run" / "metrics.jsonl", text_folder / "run" / "checkpoints"
    with started(text_folder, 2, "--steps", "1000000") as job:
        job.wait_until(lambda: path.exists() and path.read_text().count("\n") > 5)
        os.kill(job.a_rank(), signal.SIGUSR2)
        job.wait_until(lambda: committed_steps(saved))
        steps = path.read_text().count("\n")
        job.wait_until(lambda: path.read_text().count("\n") > steps)
        assert job.interrupt(limit=QUICK) == 75, job.output()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_save_that_takes_long_is_not_cut(sign, text_folder):
    """No other rank says that the weights are there while one writes, and no timer ends it."""
    folder = text_folder / "run" / "weights"
    with started(
        text_folder, 2, "--steps", "2", "--sample-tokens", "1", program=(*FAULTY, "slow-disk")
    ) as job:
        job.wait_until((folder / "model.safetensors.partial").exists)
        assert job.interrupt(sign) == 75, job.output()
        text = job.output()
    assert "the weights are in run/weights" in text
    names = [path.name for path in sorted(folder.iterdir())]
    assert {"config.json", "model.safetensors"} < set(names)
    assert not [name for name in names if name.endswith(".partial")]


class Recorded(Interruptible):
    """A process that only notes why it would end."""

    def __init__(self):
        super().__init__(speaks=False)
        self.ends = []

    def fail(self, error):
        self.ends.append(str(error))


@pytest.mark.parametrize("will_loop", [True, False])
def test_sigusr1_waits_for_steps_that_are_still_to_come(will_loop):
    """A SLURM job whose time ends while it starts up is resumed later, from a checkpoint."""
    process = Recorded()
    process.will_loop = will_loop
    process.interrupt(signal.SIGUSR1)
    assert process.stop_requested or not will_loop
    assert process.ends == ["interrupted (SIGUSR1)"] * (not will_loop)
    process.interrupt(signal.SIGTERM)
    assert process.ends.pop() == "interrupted (SIGTERM)"
    process.ends.clear()
    with process.stop_on_request():
        process.interrupt(signal.SIGUSR1)
        assert process.stop_requested
        assert process.ends == []
    process.interrupt(signal.SIGUSR1)
    assert process.ends == ["interrupted (SIGUSR1)"]


def test_nohup_is_honoured():
    assert signal.SIGHUP in obeyed()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert obeyed() == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


AT_THE_END = """
import os, signal, time
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.process import session as launch
def main(argv, session):
    session.start()
    plain = launch.mpi.finalize
    launch.mpi.finalize = lambda MPI: (
        plain(MPI), os.kill(os.getpid(), signal.SIGINT), time.sleep(2))
    return 0
launch.guard(main, [])
"""


PAUSED = """
import os, signal, subprocess, time
from mpipar.run.process import signals
from mpipar.run.process.session import guard

def main(argv, session):
    with session.stop_on_request():
        pause = f"kill -STOP {os.getpid()}; sleep 0.06; kill -CONT {os.getpid()}; sleep 0.03"
        subprocess.run(["sh", "-c", "; ".join([pause] * 5)])
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        return 0 if session.stop_requested else 1

signals.LOOK_SECONDS = 0.02
guard(main)
"""


@fault(61, "a rank is paused and continues: Ctrl-Z and fg, or SLURM's suspend", 0)
def test_a_process_that_was_paused_obeys_signals_as_before():
    """A look at the signals outlasts its time then."""
    run_command([sys.executable, "-c", PAUSED], LIMIT, environment()).ended()


def test_when_mpi_has_ended_nothing_is_asked_of_it():
    result = run_command([sys.executable, "-c", AT_THE_END], LIMIT, environment()).ended(130)
    assert result.stderr.count(BLOCK) == 1, result.tail()
