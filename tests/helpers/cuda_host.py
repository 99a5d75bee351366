"""Runs the kernels of mpipar/ops/cuda on the CPU: their unchanged sources, compiled with g++.

    run_kernel("gemm_naive.cu", "gemm_naive<float, float, false, false>", grid=(2, 3),
               block=(32, 8), args=[m, n, k, a, k, b, n, 0.0, c, n])

NumPy arrays are passed as pointers, whatever their strides, and changed in place. Numbers are
passed as `kernels.SCALARS` says, anything else as a NumPy scalar of the parameter's type.
`kernels.source` assembles the sources, with cuda_shim/mma.cuh in place of the file with inline PTX.

run_kernel runs a block's threads as fibers, in this process. `edit` is a pair (old, new) of texts:
the kernel runs with that change, which must be caught.
"""

import atexit
import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import cuda_kernels
import numpy as np

from bench.kernels import rungs
from mpipar.ops.cuda import kernels

SHIM = Path(__file__).parent / "cuda_shim"
LIMIT = 120  # seconds for the compiler
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"]
# Libraries share nothing: each has its own shared memory and its own threads.
# Fortified longjmp refuses to leave one stack for another.
FLAGS = [
    "-O1",
    "-U_FORTIFY_SOURCE",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
]


class KernelError(Exception):
    """A kernel does not compile, or did what no GPU allows; the text says where."""


@functools.cache
def build_folder():
    """The folder of compiled programs; files are named by their contents.

    It is MPIPAR_SHIM_FOLDER, or else a folder of this process, removed when it ends. All processes
    that this one starts share it.
    """
    if not os.environ.get("MPIPAR_SHIM_FOLDER"):
        own = tempfile.TemporaryDirectory(prefix="mpipar-cuda-shim-")
        atexit.register(own.cleanup)
        os.environ["MPIPAR_SHIM_FOLDER"] = own.name
    return Path(os.environ["MPIPAR_SHIM_FOLDER"])


def compile_host(file, names, edit=None):
    """Return the path of the compiled program or library with these instantiations of a file."""
    text = kernels.source(file, (SHIM, *rungs.FOLDERS))
    if edit is not None:
        assert text.count(edit[0]) == 1, f"{text.count(edit[0])} times in {file}: {edit[0]}"
        text = text.replace(*edit)
    entries = ",\n".join(f'{{"{name}", shim::Launch<&{name}>::run}}' for name in names)
    text = (
        f'#include "shim.h"\n{text}\n#line 1 "entries"\n'
        f"static const shim::Entry entries[] = {{{entries}}};\n"
        f'#include "shim_main.h"\n'
    )
    return _compiled(text)


@functools.cache
def _compiled(text):
    target = _place(text)
    if not target.exists():
        _build(target, ".cpp", text, [f"-I{_parsed_shim()}", f"-I{SHIM}"])
    return target


@functools.cache
def _place(text):
    """The path of the program compiled from this text; a change of the shim changes it too."""
    shim = "".join(path.read_text() for path in sorted(SHIM.iterdir()))
    return build_folder() / hashlib.sha256(f"{shim}{text}".encode()).hexdigest()[:16]


@functools.cache
def _parsed_shim():
    """A folder with shim.h parsed once: most of what g++ does for a kernel."""
    header = _place("") / "shim.h.gch"
    if not header.exists():
        header.parent.mkdir(exist_ok=True)
        text = (SHIM / "shim.h").read_text()
        _build(header, ".h", text, [f"-I{SHIM}", "-w", "-x", "c++-header"])
    return header.parent


def _build(target, suffix, text, options):
    """Compile, unless another process does so now: it holds the lock until the target is there."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target, suffix, text, options)


def _compile(target, suffix, text, options):
    own = target.with_suffix(f".{os.getpid()}")  # a compiler that is killed leaves no target
    source = own.with_suffix(f"{own.suffix}{suffix}")
    source.write_text(text)
    command = [
        "g++",
        "-std=c++20",
        *WARNINGS,
        *FLAGS,
        *options,
        str(source),
        "-o",
        str(own),
        "-pthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise KernelError(done.stderr)
    own.rename(target)


@functools.cache
def _library(path):
    library = ctypes.CDLL(str(path))
    library.launch.restype = ctypes.c_char_p
    return library


def _scalars(args):
    """Each argument as an array of the bytes that the kernel gets; arrays stay arrays."""
    return [
        one if isinstance(one, np.ndarray) else np.array(one, kernels.SCALARS.get(type(one)))
        for one in args
    ]


def _shape(grid, block):
    return (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])


def run_kernel(file, name, grid, block, args, shared_bytes=0, *, order=1, edit=None, together=None):
    """Run one kernel in this process; order = -1 runs threads and blocks backwards.

    together: instantiations to compile at once (default: those that `cuda_kernels.KERNELS` lists,
    or this one alone if there is an edit).
    """
    listed = together or (cuda_kernels.KERNELS.get(file, ()) if edit is None else ())
    names = listed if name in listed else (name,)
    library = _library(compile_host(file, names, edit=edit))
    values = _scalars(args)
    is_array = [isinstance(one, np.ndarray) for one in args]
    addresses = [ctypes.c_void_p(one.ctypes.data) for one in values]
    places = [
        ctypes.addressof(address) if array else address.value
        for address, array in zip(addresses, is_array, strict=True)
    ]
    sizes = [8 if array else one.nbytes for one, array in zip(values, is_array, strict=True)]
    count = len(args)
    message = library.launch(
        name.encode(),
        _shape(grid, block),
        ctypes.c_size_t(shared_bytes),
        order,
        (ctypes.c_void_p * count)(*places),
        (ctypes.c_size_t * count)(*sizes),
        ctypes.c_size_t(count),
    )
    if message:
        raise KernelError(message.decode())


def counter(file, name, edit):
    """Return the shim's variable `counted` of a kernel whose edit counts with it.

    A ctypes object with a `value`; it is that of the program that run_kernel runs.
    """
    return ctypes.c_longlong.in_dll(_library(compile_host(file, (name,), edit=edit)), "counted")
