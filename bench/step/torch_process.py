"""PyTorch's sides of bench.step, in a process of their own.

The idle threads of one library's products spin, and slow down those of the other: with two threads,
PyTorch takes up to four times as long in a process that also uses OpenBLAS. So each rank that has
PyTorch's sides starts this program, which makes a step whenever its rank asks for one.

    {"args": ..., "threads": 2, "rank": 0, "ranks": 1, "meeting": FILE} -> []
    ["torch compiled", 3] -> [loss, seconds of both passes, of the update, 0]

Messages are lines of JSON on its standard input and output; it ends with its input.

MKL, in PyTorch, asks whether the processor's maker is its own, and has slow kernels for the others.
A library of one function, loaded first, answers yes; without a C compiler, MKL keeps its choice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

from bench.results import ROOT
from mpipar.errors import EnvironmentProblem

ATTENTION, UPDATE, COMPILED = {"fused": True}, {"fused_update": True}, {"compiled": True}
BEST = ATTENTION | UPDATE
ALONE = {  # name: how PyTorch computes, see TorchDecoder
    "torch": {},
    "torch fused attention": ATTENTION,
    "torch fused attention, AdamW": BEST,
    "torch compiled": UPDATE | COMPILED,
    "torch fused attention, compiled": BEST | COMPILED,
}
TOGETHER = {"torch DDP": BEST | {"spread": "ddp"}, "torch FSDP2": BEST | {"spread": "fsdp"}}
LAUNCHER = ("PMI", "PMIX", "HYDRA", "HYDI", "OMPI_", "PRTE")  # a child is no rank of MPI
ANSWER = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
MEETING_SECONDS = 60  # for which PyTorch's ranks wait for each other


class TorchProcess:
    """The process with PyTorch's sides of this rank; every call waits for its answer."""

    def __init__(self, folder: Path, args, threads: int, rank: int = 0, ranks: int = 1):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
        environ |= {"OPENBLAS_NUM_THREADS": "1"}
        environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        if answer := mkl_answer(folder, rank):
            environ["LD_PRELOAD"] = str(answer)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from bench.step.torch_process import main; main()"],
            cwd=ROOT,
            env=environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.ask(
            {
                "args": vars(args),
                "threads": threads,
                "rank": rank,
                "ranks": ranks,
                "meeting": str(folder / "meeting"),
            }
        )

    def ask(self, question) -> list:
        """Return the answer to a question. Raises EnvironmentProblem if the process has ended."""
        line = ""
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise EnvironmentProblem(f"PyTorch's process ended with code {self.process.wait()}")
        return json.loads(line)

    def side(self, name: str) -> SimpleNamespace:
        """Return one of its sides."""
        return SimpleNamespace(take=lambda step: self.ask([name, step]))

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def mkl_answer(folder: Path, rank: int) -> Path | None:
    """Return the library that answers MKL's question, or None without a compiler."""
    compiler, path = shutil.which("cc") or shutil.which("gcc"), folder / f"answer-{rank}.so"
    if compiler is None:
        return None
    command = [compiler, "-shared", "-fPIC", "-o", path, "-xc", "-"]
    done = subprocess.run(command, input=ANSWER, text=True, check=False, capture_output=True)
    return path if done.returncode == 0 else None


def main() -> None:
    """Answer the questions of a rank, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")  # what PyTorch prints goes to standard error
    os.dup2(2, 1)
    import torch
    import torch.distributed

    from bench.step.sides import timed

    start = SimpleNamespace(**json.loads(sys.stdin.readline()))
    args, sides = SimpleNamespace(**start.args), {}
    torch.set_num_threads(start.threads)
    if start.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{start.meeting}",
            rank=start.rank,
            world_size=start.ranks,
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
    print("[]", file=answers, flush=True)
    for line in sys.stdin:
        name, step = json.loads(line)
        if name not in sides:
            sides[name] = made(args, start, (ALONE | TOGETHER)[name])
        found = timed(sides[name], step, sides[name].synchronize)
        print(json.dumps([*found, 0.0]), file=answers, flush=True)
    if start.ranks > 1:
        torch.distributed.destroy_process_group()


def made(args, start, how: dict):
    """Return PyTorch's step, from the weights that every layout of ours starts from."""
    import torch

    from bench.step.sides import configure, part_of, rows_of
    from bench.step.torch_decoder import TorchDecoder
    from bench.training import worker_of
    from mpipar.ops import make
    from mpipar.run.process.mpi import OneRank

    config = configure(args, {}, 1)
    ours = worker_of(config, OneRank(), make("cpu", "float32"))
    return TorchDecoder(
        config,
        part_of(rows_of(args), start.rank, start.ranks),
        {param.name: param.data for stage in ours.stages.values() for param in stage.params},
        device=args.device,
        dtype=getattr(torch, args.dtype),
        loss_scale=ours.loss_scale.value,
        **how,
    )
