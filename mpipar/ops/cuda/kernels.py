"""Finds the source of a CUDA kernel, compiles it at its first use, and starts it, through CuPy.

Nothing here imports CuPy, so tests and tools can read the sources without it or a GPU.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpipar.errors import EnvironmentProblem
from mpipar.ops.signature import Shape

FOLDER = Path(__file__).parent
# The kernels' names for NumPy's types.
C_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "half"}
OLDEST_DEVICE = 80  # compute capability: the first with bfloat16 products and cp.async
# For the compiler. The second is for lambdas that are templates: they cannot be marked __device__.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
PLAIN_SHARED_BYTES = 48 << 10  # a kernel has to request more shared memory than this
# The C type that a Python number becomes: all int parameters have 32 bits, all others are float.
SCALARS = {int: np.int32, float: np.float32}
KERNEL = re.compile(  # its template parameters, its name
    r"(?:template <([^>]*)>\s*)?__global__ void\s+"
    r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\("
)
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def source(file: str, folders: Sequence[Path] = (FOLDER,)) -> str:
    """Return the text of a .cu file, with mpipar's own headers in place of their includes.

    CuPy's compile cache sees only this text, so a changed header must be part of it. folders: where
    files are searched; the first one that has a file wins. Line numbers in the compiler's messages
    remain those of the files.
    """
    seen = set()

    def read(name: str) -> str:
        path = next(folder / name for folder in folders if (folder / name).exists())
        text = path.read_text().replace("#pragma once\n", "\n")
        return f'#line 1 "{path}"\n' + INCLUDE.sub(
            lambda match: include(match[1], path, text[: match.start()].count("\n") + 2), text
        )

    def include(name: str, path: Path, next_line: int) -> str:
        if name in seen:
            return ""
        seen.add(name)
        return f'{read(name)}\n#line {next_line} "{path}"'

    return read(file)


def together(name: str, text: str) -> tuple[str, ...]:
    """Return the name expressions of a source that are compiled with one of them, itself included.

    They are those of all kernels whose template parameters have the names of its own, and so get
    the same values. Most of the compile time is spent on CUDA's headers, which are thus read only
    once.
    """
    asked, _, values = name.rstrip(">").partition("<")
    parameters = {
        kernel: [one.split()[-1] for one in listed.split(",") if one]
        for listed, kernel in KERNEL.findall(text)
    }
    known = dict(zip(parameters[asked], filter(None, values.split(", ")), strict=True))
    return tuple(
        f"{kernel}<{', '.join(known[one] for one in needed)}>" if needed else kernel
        for kernel, needed in parameters.items()
        if known.keys() >= set(needed)
    )


class Loader:
    """The kernels of one device.

    CuPy compiles with NVRTC and caches the result on disk, keyed by source and architecture. A
    file's kernels of one type are compiled together. folders: see `source`.
    Raises EnvironmentProblem for a device that is too old for the kernels.
    """

    def __init__(
        self, xp: ModuleType, oldest: int = OLDEST_DEVICE, folders: Sequence[Path] = (FOLDER,)
    ) -> None:
        found = xp.cuda.Device().compute_capability
        if int(found) < oldest:
            raise EnvironmentProblem(
                f"this GPU has compute capability {found[:-1]}.{found[-1]}, and the kernels of "
                "mpipar need 8.0 (A100) or newer: use --kernels plain without --gemm, or another "
                "GPU"
            )
        self._xp, self._folders = xp, folders
        self._modules: dict[str, Any] = {}  # by kernel, whose first start finds its function
        self._functions: dict[str, Any] = {}

    def launch(
        self,
        file: str,
        name: str,
        grid: Shape,
        block: Shape,
        arguments: Iterable[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Queue one kernel on the current stream.

        file, name: a .cu file, and the name expression of a kernel in it. arguments: arrays (their
        memory, whatever their strides), ints and floats, in the kernel's order. shared_bytes:
        dynamic shared memory.
        """
        if name not in self._functions:
            if name not in self._modules:
                names = together(name, text := source(file, self._folders))
                module = self._xp.RawModule(code=text, options=OPTIONS, name_expressions=names)
                self._modules |= dict.fromkeys(names, module)
            function = self._functions[name] = self._modules[name].get_function(name)
            if shared_bytes > PLAIN_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = shared_bytes
        values = tuple(
            [SCALARS[type(one)](one) if type(one) in SCALARS else one for one in arguments]
        )
        self._functions[name](grid, block, values, shared_mem=shared_bytes)
