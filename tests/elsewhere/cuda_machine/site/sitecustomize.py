"""Python's start-up on the CUDA machine: sorts by NumPy, and poisons each block that is allocated.

Python imports this file at its start (it lies in the machine's environment).
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    """Finds CuPy's `thrust` here, and adds to its memory pool as soon as that is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "cupy.cuda.thrust":
            return importlib.util.spec_from_file_location(name, Path(__file__).parent / "thrust.py")
        if name == "cupy":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                if os.environ.get("CUDA_MACHINE_NULL", "0") == "0":  # else only its calls are left
                    _poison_blocks(module)

            spec.loader.exec_module = exec_module
            return spec
        return None


def _poison_blocks(cupy):
    """Fill each block of the pool with 0xFF, on the stream that asks for it.

    A fresh block has it from cudaMalloc. One that is taken again shows who still reads it, and who
    relies on what lay there.
    """
    pool = cupy.get_default_memory_pool()

    def malloc(size):
        block = pool.malloc(size)
        if size:
            stream = cupy.cuda.get_current_stream()
            cupy.cuda.runtime.memsetAsync(block.ptr, 0xFF, size, stream.ptr)
        return block

    cupy.cuda.set_allocator(malloc)


if importlib.util.find_spec("cupy") is not None:
    sys.meta_path.insert(0, _Finder())
