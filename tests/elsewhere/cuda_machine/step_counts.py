"""Prints the CUDA calls of one training step, and the time that Python spends in it, as JSON.

    export CUDA_MACHINE_NULL=1
    cd tests/elsewhere/cuda_machine && python run.py python step_counts.py [--layers 12]

The device costs nothing there, so the processor time of a step is Python's.
"""

import argparse
import ctypes
import json
import sys
import time
from types import SimpleNamespace

from bench.step.sides import OurSide, configure, rows_of
from mpipar.ops import make

NAMES = (
    "launch",
    "product",
    "memset",
    "cudaMalloc",
    "copy to the device",
    "copy to the host",
    "copy on the device",
    "record event",
    "synchronize event",
    "synchronize stream",
    "synchronize device",
)
WARM_UP, STEPS = 3, 5


def step_counts(layers: int, dtype: str) -> dict:
    """Return name -> calls of one step, and the least milliseconds of a step."""
    args = SimpleNamespace(
        arch="gpt2",
        layers=layers,
        d_model=64,
        heads=4,
        kv_heads=None,
        seq_len=64,
        batch_size=2,
        vocab_size=256,
        repeats=WARM_UP + STEPS,
        device="cuda",
        dtype=dtype,
    )
    side = OurSide(
        configure(args, {}, 1), rows_of(args), make("cuda", dtype), SimpleNamespace(rank=0, size=1)
    )
    count = ctypes.CDLL("libcudart.so.13").cuda_machine_count
    times = []

    def take(step):
        start = time.process_time()
        side.forward_backward(step)
        side.update(step)
        times.append(time.process_time() - start)

    for step in range(1, WARM_UP + STEPS + 1):
        before = {name: count(name.encode()) for name in NAMES}
        take(step)
        found = {name: count(name.encode()) - before[name] for name in NAMES}
    return found | {
        "python_ms": 1e3 * min(times[WARM_UP:]),
        "python_calls": calls_of(lambda: take(WARM_UP + STEPS)),
    }


def calls_of(function) -> int:
    """How often Python calls something while a function runs: like its time, but never noisy."""
    calls = 0

    def see(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    print(json.dumps(step_counts(**vars(parser.parse_args()))))
