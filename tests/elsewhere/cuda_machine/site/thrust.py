"""cupy.cuda.thrust on the CUDA machine: NumPy sorts the memory that represents the device's."""

import contextlib
import ctypes

import numpy as np

available = True
_machine = ctypes.CDLL("libcudart.so.13")


def get_build_version():
    """Return a version of Thrust: none."""
    return 0


@contextlib.contextmanager
def _opened():
    """Let the host touch device memory, in which everything queued is done."""
    from cupy.cuda import stream

    stream.get_current_stream().synchronize()
    _machine.cuda_machine_open()
    yield
    _machine.cuda_machine_close()


def _array(pointer, dtype, shape):
    dtype, count = np.dtype(dtype), int(np.prod(shape))
    buffer = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(pointer)
    return np.ndarray(shape, dtype, buffer)


def sort(dtype, data, keys, shape):
    """Sort along the last axis, in place."""
    with _opened():
        _array(data, dtype, tuple(shape)).sort(axis=-1, kind="stable")


def argsort(dtype, idx, data, keys, shape):
    """Sort along the last axis, in place, and give the places of before."""
    with _opened():
        x = _array(data, dtype, tuple(shape))
        order = np.argsort(x, axis=-1, kind="stable")
        _array(idx, np.uintp, tuple(shape))[...] = order
        x[...] = np.take_along_axis(x, order, -1)


def lexsort(dtype, idx, keys, k, n):
    """Give the order of n numbers by k keys, the last one first."""
    with _opened():
        _array(idx, np.uintp, (n,))[...] = np.lexsort(_array(keys, dtype, (k, n)))
