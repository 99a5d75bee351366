"""Replaces CuPy below the wires of several ranks: NumPy arrays that refuse to mix with host arrays.

It proves which calls the device path makes, in which order, and that host and device memory are not
mixed. It proves nothing about CUDA, and computes by the plain formulas: the real CuPy runs on the
CUDA machine. `stream.busy` is true from any computation until the stream is synchronized. Copies on
other streams run as late as CUDA allows (fake_streams.py).
"""

import ctypes
import sys
import time
import types

import fake_streams
import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cupy_ops import CupyOps

__version__ = "14.2.0"  # the version that behaves like this


class Stream:
    """The default stream: what is computed there first waits for the events it was told of."""

    reads_host = False  # a copy from host memory is queued
    ptr = 0
    synchronized = 0

    def __init__(self):
        self._busy, self._after = False, []

    @property
    def busy(self):
        return self._busy

    @busy.setter
    def busy(self, value):
        after, self._after = self._after, []
        for event in after:
            event.synchronize()
        self._busy = value

    def wait_event(self, event):
        self._after.append(event)

    def synchronize(self):
        self.busy = self.reads_host = False
        self.synchronized += 1

    def record(self):
        return Event()


stream = default = Stream()


class Memory:
    """Memory of an array, from an address."""

    def __init__(self, address):
        self.ptr = address

    def copy_from_device_async(self, source, size, stream):
        to, x = (
            np.frombuffer((ctypes.c_char * size).from_address(one.ptr), np.uint8)
            for one in (self, source)
        )
        stream.copy(to, x, x)


class DeviceArray(np.ndarray):
    """An array in 'device memory'."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        for x in (*inputs, *(out or ())):
            if isinstance(x, np.ndarray) and x.ndim and not isinstance(x, DeviceArray):
                raise TypeError(f"{ufunc.__name__}: a host array meets a device array")
        stream.busy = True
        plain = [x.view(np.ndarray) if isinstance(x, DeviceArray) else x for x in inputs]
        if out is not None:
            options["out"] = tuple(x.view(np.ndarray) for x in out)
        result = getattr(ufunc, method)(*plain, **options)
        if out is not None:
            return out[0]
        return device(result) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function, kinds, arguments, options):
        stream.busy = True
        return on_device(
            function(
                *map(on_host, arguments), **{key: on_host(value) for key, value in options.items()}
            )
        )

    def __getitem__(self, key):
        if isinstance(key, np.ndarray):
            stream.busy = True  # not a view
        return super().__getitem__(key)

    def reshape(self, *shape):
        found = super().reshape(*shape)
        if np.may_share_memory(found, self) or not self.size:
            return found
        stream.busy = True  # a copy
        return super().reshape(*shape)

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray) and value.ndim and not isinstance(value, DeviceArray):
            raise TypeError("a host array is assigned to a device array")
        stream.busy = True
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
        """Queue the copy, like CuPy's `set`; it may not be done on return."""
        assert not isinstance(arr, DeviceArray)
        if stream is not None:
            stream.copy(self.view(np.ndarray), arr, arr)
            return
        default.busy = default.reads_host = True
        np.copyto(self.view(np.ndarray), arr)

    def get(self, stream=None, out=None, blocking=True):
        assert not isinstance(out, DeviceArray)
        if not blocking:
            stream.copy(out, self.view(np.ndarray), out)
            return
        default.synchronize()
        np.copyto(out, self.view(np.ndarray))


def _queued(function, result=lambda x: x):
    """The function, as a computation on the stream."""

    def call(*arguments, **options):
        stream.busy = True
        return result(function(*arguments, **options))

    return call


for _name in ("astype", "copy", "sum", "max", "min", "mean", "argmax", "argsort"):
    setattr(DeviceArray, _name, _queued(getattr(np.ndarray, _name)))


def device(x):
    return np.asarray(x).view(DeviceArray)


def on_host(x):
    """The same memory as plain arrays, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)(map(on_host, x))
    return x.view(np.ndarray) if isinstance(x, DeviceArray) else x


def on_device(x):
    """The same memory as device arrays, in lists and tuples too."""
    if isinstance(x, list | tuple):
        return type(x)(map(on_device, x))
    return device(x) if isinstance(x, np.ndarray) else x


def asnumpy(x):
    stream.synchronize()
    return np.array(x.view(np.ndarray))


def no_kernel(*arguments, **options):
    """Kernels and the tables of cuBLAS that `CupyOps` asks for are not used: see `put_in`."""


RawModule = ReductionKernel = ElementwiseKernel = no_kernel


class Event:
    """An event; here everything queued before it is done at once."""

    def __init__(self):
        self.record()

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        stream.synchronize()


def elapsed_ms(start, stop):
    return 1e3 * (stop.time - start.time)


def alloc_pinned_memory(nbytes):
    """Pinned memory. CuPy's pool reuses returned memory first, so no queued copy may still read."""
    assert not stream.reads_host, "page-locked memory is given away while a copy still reads it"
    return fake_streams.Pinned(nbytes)


def get_default_memory_pool():
    return types.SimpleNamespace(total_bytes=lambda: 1)


cuda = types.SimpleNamespace(
    get_current_stream=lambda: stream,
    alloc_pinned_memory=alloc_pinned_memory,
    Device=lambda number=0: types.SimpleNamespace(
        id=number,
        use=lambda: None,
        pci_bus_id="0000:3B:00.0",
        compute_capability="90",
        attributes={"MultiProcessorCount": 3, "L2CacheSize": 256},
    ),
    Event=Event,
    Stream=fake_streams.Stream,
    get_elapsed_time=elapsed_ms,
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 0,  # of which there is no cuBLASLt
        getDeviceProperties=lambda number: {"name": b"NVIDIA H200"},
        **dict.fromkeys(("CUDA_R_64F", "CUDA_R_32F", "CUDA_R_16BF", "CUDA_R_16F")),
    ),
    cublas=None,
    device=None,
)
ndarray = DeviceArray


zeros, ones, full, arange, asarray, ascontiguousarray, array = (
    _queued(getattr(np, name), device)
    for name in ("zeros", "ones", "full", "arange", "asarray", "ascontiguousarray", "array")
)


def empty(*arguments, **options):
    """New memory: nothing is computed."""
    return device(np.empty(*arguments, **options))


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
    fake_streams.Stream.queued.clear()  # what a broken twin has left
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
