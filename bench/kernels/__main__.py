"""Reports of NVIDIA's compiler on the GEMM ladder; needs the extra `nvrtc`, but no GPU.

    python -m bench.kernels [--json FILE]

Columns: flop_per_byte: FLOPs per byte of operands that a block reads from global memory, caches
aside. shared_KiB: shared memory of a block. registers_*: registers per thread, for that
architecture. No kernel spills registers to memory:
tests/elsewhere/cuda/test_cuda_compile.py checks that.
"""

from __future__ import annotations

from math import prod

from bench.kernels import nvrtc, rungs
from bench.program import Outcome, Program
from mpipar.errors import EnvironmentProblem
from mpipar.ops.cuda import kernels

ARCHITECTURES = ("sm_80", "sm_90")


def rows() -> list[dict]:
    """Return one row per rung, with its default tiles."""
    compiler, found = nvrtc.Nvrtc(), []
    for rung, kind in rungs.RUNGS.items():
        dtype, itemsize = ("bfloat16", 2) if rung == "mma" else ("float32", 4)
        kernel = rungs.gemm(rung, "NN", dtype)
        text = kernels.source(kernel.file, rungs.FOLDERS)
        usage = {arch: compiler.compile(text, [kernel.name], arch)[1] for arch in ARCHITECTURES}
        static = usage[ARCHITECTURES[0]][kernel.name].shared_bytes
        found.append(
            {
                "kernel": f"gemm_{rung}.cu",
                "operands": dtype,
                "tiles": ", ".join(
                    f"{name} {size}"
                    for name, size in zip(kind.tiles.split(), kind.default, strict=True)
                )
                or "-",
                "threads": prod(kernel.block),
                "flop_per_byte": rungs.flop_per_byte(kernel, itemsize),
                "shared_KiB": (static + kernel.shared_bytes) / 1024,
                **{
                    f"registers_{arch}": usage[arch][kernel.name].registers
                    for arch in ARCHITECTURES
                },
            }
        )
    return found


def measure(args, session) -> Outcome:
    """Compile every rung. Raises EnvironmentProblem without the compiler."""
    if (missing := nvrtc.missing()) is not None:
        raise EnvironmentProblem(f"{missing}: pip install '.[nvrtc]'")
    return Outcome(rows(), {"nvrtc": nvrtc.Nvrtc().version()})


main = Program("kernels", __doc__, measure).started(__name__)
