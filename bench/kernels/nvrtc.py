"""Compiles kernels with NVIDIA's runtime compiler, through ctypes; needs no GPU and no driver."""

import ctypes
import importlib.util
import re
from collections import namedtuple
from pathlib import Path

from mpipar.ops.cuda.kernels import OPTIONS

# registers: per thread. spill_bytes: stored and loaded per thread, because registers ran out.
# stack_bytes: per thread; arrays whose index the compiler does not know count too.
# shared_bytes: static shared memory per block.
Usage = namedtuple("Usage", "registers spill_bytes stack_bytes shared_bytes")


def folder(package, inside):
    """Return a folder of one of NVIDIA's wheels, or None."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else ():
        if (Path(base) / package / inside).is_dir():
            return Path(base) / package / inside
    return None


def missing():
    """Return why nothing can be compiled here, or None."""
    if folder("cuda_nvrtc", "lib") is None:
        return "nvidia-cuda-nvrtc-cu12 is not installed"
    if folder("cuda_runtime", "include") is None:
        return "nvidia-cuda-runtime-cu12 is not installed"
    return None


class Nvrtc:
    """The library; a call that fails raises RuntimeError with the compiler's log."""

    def __init__(self):
        library = next(folder("cuda_nvrtc", "lib").glob("libnvrtc.so.*"))
        self._library = ctypes.CDLL(str(library))

    def _call(self, name, *arguments):
        return getattr(self._library, f"nvrtc{name}")(*arguments)

    def _text(self, name, program):
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", program, text)
        return text.raw

    def version(self):
        """Return the compiler's version, such as "12.9"."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source, names, arch):
        """Return two mappings from name expressions, for an architecture such as "sm_90".

        The first maps to PTX, the code before registers are assigned, the second to Usage.
        """
        program = ctypes.c_void_p()
        self._call(
            "CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        for name in names:
            self._call("AddNameExpression", program, name.encode())
        options = [
            f"--gpu-architecture={arch}",
            *OPTIONS,
            "--ptxas-options=-v",
            f"--include-path={folder('cuda_runtime', 'include')}",
        ]
        code = self._call(
            "CompileProgram",
            program,
            len(options),
            (ctypes.c_char_p * len(options))(*map(str.encode, options)),
        )
        log = self._text("ProgramLog", program).rstrip(b"\0").decode()
        if code:
            raise RuntimeError(log)
        ptx, usage = {}, {}
        code = self._text("PTX", program).decode()
        for name in names:
            lowered = ctypes.c_char_p()
            self._call("GetLoweredName", program, name.encode(), ctypes.byref(lowered))
            lowered = lowered.value.decode()
            ptx[name] = code.split(f".entry {lowered}(")[1].split(".entry")[0]
            usage[name] = _usage(log, lowered)
        self._call("DestroyProgram", ctypes.byref(program))
        return ptx, usage


def _usage(log, lowered):
    """Return the Usage of one kernel, from ptxas's log."""
    part = log.split(f"Compiling entry function '{lowered}'")[1].split("Compiling entry")[0]
    registers = int(re.search(r"Used (\d+) registers", part)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
    stack = int(re.search(r"(\d+) bytes stack frame", part)[1])
    shared = re.search(r"(\d+) bytes smem", part)
    return Usage(registers, spills, stack, int(shared[1]) if shared else 0)
