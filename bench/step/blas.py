"""The BLAS library on each side of a comparison, and the processor that its kernels are for.

A library chooses its kernels by the processor it finds. If the libraries of two sides choose
differently, the comparison measures those libraries too, so a table of speeds names both.

This module can also free the BLAS of both sides from what they know of the processor's maker.

OpenBLAS runs the kernels for the processor's vector units, as in `mpipar train`. MKL asks whether
the maker is its own, and has slow kernels for the others; if the answer is yes, it chooses by the
vector units alone too. To give that answer, a library of one function is compiled, and loaded
before PyTorch. Without a compiler, MKL keeps its own choice.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from mpipar.files.cache import cache_folder
from mpipar.job import blas

# MKL prints this first line of its log at the first product.
MKL_LINE = re.compile(r"^MKL_VERBOSE oneMKL (\d+\.\d+)\D.*?architecture (.*?),? Lnx", re.MULTILINE)
MKL_SET = re.compile(r"(?:AVX|SSE)[\w.-]*")  # "... Vector Extensions 512 (Intel(R) AVX-512) ..."
OTHERS = ("/torch/", "/scipy.libs/")  # packages that bring a BLAS of their own
FIRST_PRODUCT = "{}import torch; a = torch.ones(300, 300); a @ a"
FREED = "from bench.step.blas import free_mkl; free_mkl(); "


def numpy_blas() -> str:
    """Return NumPy's library with its version and the processor it is tuned for."""
    own = (
        blas.shown(pool)
        for pool in blas.pools()
        if not any(part in pool["filepath"] for part in OTHERS)
    )
    return next(own, "unknown").replace(", kernels for", "")


@cache
def torch_blas(freed: bool = False) -> str:
    """Return PyTorch's library as MKL's log names it; "unknown" if PyTorch uses another one.

    MKL is linked into PyTorch and cannot be asked, so a separate process multiplies once. freed:
    whether MKL is freed there, see the module's docstring.
    """
    code = FIRST_PRODUCT.format(FREED if freed else "")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"MKL_VERBOSE": "1"},
        timeout=120,
        check=False,
    )
    found = MKL_LINE.search(done.stdout)
    if not found:
        return "unknown"
    sets = MKL_SET.search(found[2])
    return f"mkl {found[1]} {sets[0] if sets else found[2]}"


FLAG = "--freed"  # of bench.step
SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
COMPILERS = ("cc", "gcc", "clang")


def free_openblas() -> str | None:
    """Choose its kernels; return their architecture. Call it before NumPy is loaded."""
    chosen = os.environ.get(blas.VARIABLE) or blas.choice(blas.processor()[1])
    if chosen:
        os.environ[blas.VARIABLE] = chosen
    return chosen


def mkl_answer() -> Path | None:
    """Return the library that answers MKL's question, compiled once; None without a compiler."""
    compiler, folder = next(filter(None, map(shutil.which, COMPILERS)), None), cache_folder("mkl")
    if compiler is None or folder is None:
        return None
    path = folder / "answer.so"
    if not path.exists():
        own = folder / f"{os.getpid()}.so"
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-o", own, "-xc", "-"],
                input=SOURCE,
                text=True,
                check=True,
                capture_output=True,
                timeout=60,
            )
            own.replace(path)
    return path if path.exists() else None


def free_mkl() -> bool:
    """Load that library; return whether there is one. Call it before PyTorch is loaded."""
    path = mkl_answer()
    if path is not None:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path is not None
