"""`mpipar train --device cuda` on the CUDA machine: results as on a CPU, and nothing late.

In float64 all kernels are the plain formulas, so losses and weights agree to rounding. In 16 bits
the fused kernels run, which round elsewhere. AdamW makes any difference of a gradient that is
nearly zero as large as its step, so there only the losses are compared.
"""

import itertools
import sys

import numpy as np
import pytest
from helpers import run_ranks
from program import LIMIT, TEXT, environment, metrics, mpipar, weights
from test_cuda_machine import pytestmark  # noqa: F401  (gpu, and the machine alone)

from mpipar.comm.record import PASSES
from mpipar.run.trace import trace_file
from mpipar.study.trace.analysis import Analysis

MODEL = (
    "--d-model",
    32,
    "--heads",
    4,
    "--layers",
    2,
    "--seq-len",
    16,
    "--batch-size",
    4,
    "--num-microbatches",
    2,
    "--steps",
    3,
    "--eval-tokens",
    64,
    "--sample-tokens",
    4,
    *TEXT,
)
CLOSE = {"float64": 1e-12, "bfloat16": 2e-4}


MARGIN = 10**6  # ns between the clocks of host and device
AWARE = {"MPIPAR_CUDA_AWARE": "yes", "CUDA_MACHINE_AWARE": "1"}
BROKEN = """
import sys
from mpipar.__main__ import main
from mpipar.ops.cupy_copies import Copies
from mpipar.ops.cupy_ops import CupyOps
{}
sys.exit(main())
"""
TWINS = {  # what is wrong: (environment, layout, how)
    "MPI gets what is still computed": (AWARE, "dp=2", "CupyOps.synchronize = lambda self: None"),
    "a pass reads what has not arrived": (
        {},
        "pp=2",
        "Copies.use_after = lambda self, event: None",
    ),
}


def words(folder, device, *options):
    """The command line of a run on this device."""
    kernels = ("--kernels", "plain") if device == "cuda" and "float64" in options else ()
    return ("train", "--device", device, "--out", folder / device, *MODEL, *options, *kernels)


def losses(folder):
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def trained(folder, device, *options, ranks=2, env=None):
    """The losses and the weights of a run."""
    done = mpipar(*words(folder, device, *options), ranks=ranks, env=env)
    assert done.returncode == 0, done.tail()
    return losses(folder / device), weights(folder / device)


PAIRED = (
    "dp=2",
    "pp=2",
    "tp=2",
    "cp=2",
    "dp=2 --zero 3",
    "pp=2,tp=2",
    "dp=2,cp=2 --zero 3",
    "dp=2,ep=2 --arch mixtral",
)  # with a type of numbers each


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*zip(PAIRED, itertools.cycle(CLOSE))],
)
def test_training_equals_the_cpu(tmp_path, layout, dtype):
    options = ("--layout", *layout.split(), "--dtype", dtype)
    ranks = 2 ** (layout.count("=") - layout.count("ep="))
    (cpu, cpu_weights), (cuda, cuda_weights) = (
        trained(tmp_path, device, *options, ranks=ranks) for device in ("cpu", "cuda")
    )
    assert cuda == pytest.approx(cpu, rel=CLOSE[dtype], abs=0)
    for name, x in cpu_weights.items() if dtype == "float64" else ():
        assert np.abs(cuda_weights[name] - x).max() <= CLOSE[dtype] * np.abs(x).max(), name


FLOAT64 = ("--layout", "dp=2", "--dtype", "float64")


def test_an_odd_vocabulary_goes_from_the_cpu_to_the_device_and_back(tmp_path):
    """The device pads each rank's rows to 128, the CPU to 66: the second rank's true rows differ.

    All nine steps on the CPU give the same weights.
    """
    options = ("--layout", "tp=2", "--dtype", "float64", "--vocab-size", 131)
    found = {}
    for devices in (("cpu", "cpu", "cpu"), ("cpu", "cuda", "cpu")):
        folder = tmp_path / "-".join(devices)
        for part, device in enumerate(devices, 1):
            more = ("--kernels", "numpy") if device == "cpu" else ()
            more += ("--resume", "auto", "--steps", 3 * part) if part > 1 else ()
            trained(folder, device, *options, *more)
            (folder / device).rename(folder / "moved")
            if part < len(devices):
                (folder / "moved").rename(folder / devices[part])
        found[devices] = losses(folder / "moved"), weights(folder / "moved")
    (cpu, cpu_weights), (mixed, mixed_weights) = found.values()
    assert len(cpu) == 9
    assert mixed == pytest.approx(cpu, rel=1e-12, abs=0)
    assert len(mixed_weights["transformer.wte.weight"]) == 131
    for name, x in cpu_weights.items():
        assert np.abs(mixed_weights[name] - x).max() <= 1e-12 * np.abs(x).max(), name


def test_passes_end_on_the_device_within_their_traced_step(tmp_path):
    """The host waits once a step, so the ends of passes are times of events; none overlap."""
    done = mpipar(*words(tmp_path, "cuda", *FLOAT64, "--layout", "pp=2", "--trace", "2:3"), ranks=2)
    assert done.returncode == 0, done.tail()
    trace = trace_file.read(tmp_path / "cuda")
    assert Analysis(trace)
    for rank in trace.ranks:
        for step, start, end in rank.steps:
            spans = sorted(
                (span.start_ns, span.end_ns, span.kind)
                for span in rank.spans
                if span.step == step and span.kind in (*PASSES, "opt")
            )
            assert [kind for *_, kind in spans].count("F") == 2
            assert spans[-1][2] == "opt"
            ends = [
                start - MARGIN,
                *(time for first, last, _ in spans for time in (first, last)),
                end + MARGIN,
            ]
            assert ends == sorted(ends), (step, spans)


def test_device_pointers_in_the_hands_of_mpi(tmp_path):
    cpu, cuda = trained(tmp_path, "cpu", *FLOAT64), trained(tmp_path, "cuda", *FLOAT64, env=AWARE)
    assert cuda[0] == pytest.approx(cpu[0], rel=CLOSE["float64"], abs=0)


@pytest.mark.parametrize("name", TWINS)
def test_a_forgotten_wait_is_seen(tmp_path, name):
    env, layout, twin = TWINS[name]
    options = ("--layout", layout, "--dtype", "float64")
    cpu, _ = trained(tmp_path, "cpu", *options)
    program = [sys.executable, "-c", BROKEN.format(twin), *words(tmp_path, "cuda", *options)]
    done = run_ranks(2, [*map(str, program)], LIMIT, environment(env))
    assert done.returncode or losses(tmp_path / "cuda") != pytest.approx(cpu, rel=1e-3, abs=0)


def test_a_run_resumes_and_generates_where_it_was_not_trained(tmp_path):
    """Steps 1 to 3 on the device, 4 to 6 on the CPU, as all on the CPU; the same greedy text."""
    more = (*FLOAT64, "--resume", "auto", "--steps", 6)
    for device in ("cpu", "cuda"):
        trained(tmp_path, device, *FLOAT64)
    trained(tmp_path, "cpu", *more)
    (tmp_path / "cuda").rename(tmp_path / "moved")
    done = mpipar(
        "train",
        "--device",
        "cpu",
        "--kernels",
        "numpy",
        "--out",
        tmp_path / "moved",
        *MODEL,
        *more,
        ranks=2,
    )
    assert done.returncode == 0, done.tail()
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-12, abs=0)
    texts = [
        mpipar(
            "generate",
            tmp_path / "moved" / "weights",
            "--device",
            device,
            "--dtype",
            "float64",
            "--temperature",
            0,
            "--sample-tokens",
            8,
            "--prompt",
            "The ",
        )
        for device in ("cpu", "cuda")
    ]
    assert [text.returncode for text in texts] == [0, 0], texts[1].tail()
    assert texts[0].stdout == texts[1].stdout
