"""Which library multiplies matrices on each side of a comparison, and for which processor.

A library chooses its kernels by the processor it finds. If the libraries of two sides choose
differently, the comparison measures those libraries too. So a table of speeds names both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from mpipar.job import blas

# MKL prints this first line of its log at the first product.
MKL_LINE = re.compile(r"^MKL_VERBOSE oneMKL (\d+\.\d+)\D.*?architecture (.*?),? Lnx", re.MULTILINE)
MKL_SET = re.compile(r"(?:AVX|SSE)[\w.-]*")  # "... Vector Extensions 512 (Intel(R) AVX-512) ..."
OTHERS = ("/torch/", "/scipy.libs/")  # packages that bring a BLAS of their own
FIRST_PRODUCT = "{}import torch; a = torch.ones(300, 300); a @ a"
FREED = "from bench.step.freed import free_mkl; free_mkl(); "


def numpy_blas() -> str:
    """NumPy's library with its version and the processor it is tuned for."""
    own = (blas.shown(pool) for pool in blas.pools()
           if not any(part in pool["filepath"] for part in OTHERS))
    return next(own, "unknown").replace(", kernels for", "")


def torch_blas(freed: bool = False) -> str:
    """PyTorch's library as MKL's log names it; "unknown" where PyTorch has another one.

    MKL is linked into PyTorch and cannot be asked. So a separate process multiplies once.
    freed: whether MKL is freed there, see `bench.step.freed`.
    """
    code = FIRST_PRODUCT.format(FREED if freed else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {"MKL_VERBOSE": "1"}, timeout=120, check=False)
    found = MKL_LINE.search(done.stdout)
    if not found:
        return "unknown"
    sets = MKL_SET.search(found[2])
    return f"mkl {found[1]} {sets[0] if sets else found[2]}"
