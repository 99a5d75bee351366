"""Frees the BLAS of both sides of a comparison from what they know of the processor's maker.

OpenBLAS runs the kernels for the processor's vector units, as in `mpipar train`. MKL asks whether
the maker is its own, and has slow kernels for the others. Answered with yes, it too chooses by the
vector units alone. So a library of one function is compiled, and loaded before PyTorch. Where there
is no compiler, MKL keeps its own choice.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from mpipar.files.cache import cache_folder
from mpipar.job import blas

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
    """The library that answers MKL's question, compiled once; None without a compiler."""
    compiler, folder = next(filter(None, map(shutil.which, COMPILERS)), None), cache_folder("mkl")
    if compiler is None or folder is None:
        return None
    path = folder / "answer.so"
    if not path.exists():
        own = folder / f"{os.getpid()}.so"
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([compiler, "-shared", "-fPIC", "-o", own, "-xc", "-"], input=SOURCE,
                           text=True, check=True, capture_output=True, timeout=60)
            own.replace(path)
    return path if path.exists() else None


def free_mkl() -> bool:
    """Load that library; whether there is one. Call it before PyTorch is loaded."""
    path = mkl_answer()
    if path is not None:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path is not None
