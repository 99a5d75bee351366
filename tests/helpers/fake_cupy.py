"""Replaces CuPy where there is no GPU: NumPy arrays that refuse to mix with host arrays.

It proves which calls the device path makes, in which order, and that host and device memory are not
mixed. It proves nothing about CUDA. `cuda.stream.busy` is true from any computation until the
stream is synchronized. Kernels run on the CPU (cuda_host.py), and at once. Copies on other streams
run as late as CUDA allows (fake_streams.py).
"""

import ctypes
import time
import types

import cuda_kernels
import fake_cublas
import fake_streams
import numpy as np
from cuda_host import run_kernel

from mpipar.ops.cuda import kernels

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


KERNELS = {  # what the CUDA C++ of CuPy's own kinds of kernels stands for
    "double(x) * double(x)": lambda x: np.square(x.astype(np.float64)).sum(),
    "data -= lr * grad": lambda grad, lr, data: np.subtract(data, lr * grad, out=data),
}


class ElementwiseKernel:
    """A kernel of one line, compiled by CuPy."""

    def __init__(self, takes, gives, line, *rest):
        self.function = KERNELS[line]

    def __call__(self, *arguments):
        stream.busy = True
        return on_device(self.function(*map(on_host, arguments)))


ReductionKernel = ElementwiseKernel


class RawModule:
    """A file of mpipar's own kernels, recognized by the text of its unchanged source."""

    def __init__(self, code, options, name_expressions):
        assert options == kernels.OPTIONS
        self.file = next(file for file in cuda_kernels.KERNELS if cuda_kernels.source(file) == code)
        self.names = name_expressions

    def get_function(self, name):
        assert name in self.names
        return RawKernel(self.file, name)


class RawKernel:
    """One kernel of a file."""

    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, file, name):
        self.file, self.name = file, name

    def __call__(self, grid, block, arguments, shared_mem):
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        assert all(grid), "CUDA starts no grid without blocks"
        for one in arguments:  # CuPy passes a Python int as 8 bytes: the type must be given
            assert isinstance(one, DeviceArray | np.int32 | np.int64 | np.float32), type(one)
        stream.busy = True
        run_kernel(self.file, self.name, grid, block, arguments, shared_mem)


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
        **{name: value for name, value in vars(fake_cublas).items() if name.startswith("CUDA_R_")},
    ),
    device=types.SimpleNamespace(get_cublas_handle=lambda: fake_cublas.HANDLE),
    cublas=types.SimpleNamespace(
        gemmEx=_queued(fake_cublas.gemm_ex),
        gemmStridedBatchedEx=_queued(fake_cublas.gemm_strided_batched_ex),
        **{name: value for name, value in vars(fake_cublas).items() if name.startswith("CUBLAS_")},
    ),
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
