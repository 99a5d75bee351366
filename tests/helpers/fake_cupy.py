"""Replaces CuPy where MPI plays NCCL (fake_nccl.py): NumPy arrays, computed by the plain formulas.

`default.busy` is true from any computation until the default stream is synchronized. A copy on
another stream runs when its event is waited for, or one at each test of an event. What the real
CuPy does, and what CUDA forbids, shows on the CUDA machine.
"""

import ctypes
import sys
import time
import types
from collections import deque
from typing import ClassVar

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cupy_ops import CupyOps

__version__ = "14.2.0"  # the version that behaves like this


class Copy:
    """A copy on a stream. ready: what it waits for beside the copies before it is done."""

    ready, done = True, False

    def __init__(self, to, source):
        self.to, self.source = to, source

    def run(self):
        self.to[...] = self.source
        self.done = True


class Stream:
    """A queue of copies, and of the calls of NCCL."""

    by_address: ClassVar[dict] = {}  # all streams
    busy = False

    def __init__(self, non_blocking):
        assert non_blocking, "this stream waits for the default one: nothing would overlap"
        self.copies = deque()
        self.ptr = len(self.by_address)
        self.by_address[self.ptr] = self

    def copy(self, to, source):
        self.copies.append(Copy(to, source))

    def wait_event(self, event):
        event.synchronize()

    def synchronize(self):
        self.busy = False

    def record(self):
        return Event(self)


class Event:
    """The end of all copies that are on the stream now."""

    def __init__(self, stream):
        self.stream, self.copies, self.time = stream, tuple(stream.copies), time.perf_counter()

    @property
    def done(self):
        """Whether they have run; a look takes as long as a copy."""
        if all(copy.done for copy in self.copies):
            return True
        if self.stream.copies[0].ready:
            self.stream.copies.popleft().run()
        return False

    def synchronize(self):
        while not all(copy.done for copy in self.copies):
            self.stream.copies.popleft().run()


default = Stream(non_blocking=True)


class Memory:
    """Memory of an array, from an address."""

    def __init__(self, address):
        self.ptr = address

    def copy_from_device_async(self, source, size, stream):
        stream.copy(
            *(
                np.frombuffer((ctypes.c_char * size).from_address(one.ptr), np.uint8)
                for one in (self, source)
            )
        )


class DeviceArray(np.ndarray):
    """An array in 'device memory'."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        default.busy = True
        if out is not None:
            options["out"] = tuple(map(on_host, out))
        result = getattr(ufunc, method)(*map(on_host, inputs), **options)
        return on_device(result) if out is None else out[0]

    def __array_function__(self, function, kinds, arguments, options):
        default.busy = True
        named = {key: on_host(value) for key, value in options.items()}
        return on_device(function(*map(on_host, arguments), **named))

    def __setitem__(self, key, value):
        default.busy = True
        super().__setitem__(key, value)

    @property
    def strides(self):
        """Those of CuPy, where an array without elements has strides of 0."""
        return super().strides if self.size else (0,) * self.ndim

    @property
    def data(self):
        """Memory like CuPy's: `ptr` is the address of the first element."""
        return Memory(self.ctypes.data)

    def set(self, arr, stream=None):
        if stream is None:
            np.copyto(on_host(self), arr)
        else:
            stream.copy(on_host(self), arr)

    def get(self, stream=None, out=None, blocking=True):
        if blocking:
            default.synchronize()
            np.copyto(out, on_host(self))
        else:
            stream.copy(out, on_host(self))


def on_host(x):
    """The same memory as plain arrays, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)(map(on_host, x))
    return x.view(np.ndarray) if isinstance(x, DeviceArray) else x


def on_device(x):
    """The same memory as device arrays, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)(map(on_device, x))
    return x.view(DeviceArray) if isinstance(x, np.ndarray) else x


def asnumpy(x):
    default.synchronize()
    return np.array(on_host(x))


def no_kernel(*arguments, **options):
    """Kernels and the tables of cuBLAS that `CupyOps` asks for are not used: see `put_in`."""


RawModule = ReductionKernel = ElementwiseKernel = no_kernel
cuda = types.SimpleNamespace(
    get_current_stream=lambda: default,
    alloc_pinned_memory=bytearray,
    Device=lambda number=0: types.SimpleNamespace(
        id=number, use=lambda: None, pci_bus_id="0000:3B:00.0", compute_capability="90"
    ),
    Stream=Stream,
    get_elapsed_time=lambda start, stop: 1e3 * (stop.time - start.time),
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 0,  # of which there is no cuBLASLt
        getDeviceProperties=lambda number: {"name": b"NVIDIA H200"},
        **dict.fromkeys(("CUDA_R_64F", "CUDA_R_32F", "CUDA_R_16BF", "CUDA_R_16F")),
    ),
    cublas=types.SimpleNamespace(CUBLAS_COMPUTE_32F=None, CUBLAS_COMPUTE_64F=None),
    device=None,
)


def get_default_memory_pool():
    return types.SimpleNamespace(total_bytes=lambda: 1)


def _made(name):
    """A function of NumPy that makes an array."""
    return lambda *arguments, **options: on_device(getattr(np, name)(*arguments, **options))


empty, zeros, ones, full, arange, asarray, ascontiguousarray, array = map(
    _made, "empty zeros ones full arange asarray ascontiguousarray array".split()
)


def __getattr__(name):
    return getattr(np, name)


# Functions of which a GPU has its own.
COMPUTED = (
    "matmul",
    "matmul_tn_add",
    "_multiply",
    "_stacked_products",
    "square_sum",
    "sgd_step",
    "embedding_forward",
    "embedding_backward_weight",
    "position_forward",
    "position_backward_weight",
)


def put_in(monkeypatch):
    """Let `import cupy` find this module, and `CupyOps` compute by the plain formulas."""
    monkeypatch.setitem(sys.modules, "cupy", sys.modules[__name__])
    monkeypatch.setattr(CupyOps, "takes_16_bits", ())
    for name in COMPUTED:
        monkeypatch.setattr(CupyOps, name, getattr(ArrayOps, name))


def put_in_nccl(monkeypatch, pci_bus_id=None):
    """Also NCCL, which MPI plays in a thread, and for each rank a GPU with this or its own id."""
    import fake_nccl

    put_in(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake_nccl)
    monkeypatch.setattr(cuda, "nccl", fake_nccl, raising=False)
    own = {"pci_bus_id": pci_bus_id or f"0000:{fake_nccl.BOOT.rank:02X}:00.0"}
    device = types.SimpleNamespace(**vars(cuda.Device()) | own)
    monkeypatch.setattr(cuda, "Device", lambda number=0: device)
