"""The fused array functions with kernels that run on the CPU, and on a GPU, for tests of both."""

from types import SimpleNamespace

import numpy as np
from cuda_host import run_kernel

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.fused import FusedOps
from mpipar.ops.mixed_ops import DTYPES, MixedOps

OF_CUPY = (
    "matmul",
    "matmul_tn_add",
    "_multiply",
    "sum",
    "square_sum",
    "to_floats",
    "to_host",
    "synchronize",
    "sgd_step",
)  # what a GPU has of its own besides kernels of mpipar


def poisoned(shape, dtype=np.float64):
    """New memory in which an element that no kernel writes is seen."""
    return np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else -7, dtype)


class HostLoader:
    """Starts kernels on the CPU, as `kernels.Loader` does on a GPU.

    order: 1 or -1, the order of threads. edit: made to the file `edited`. started: their names.
    """

    def __init__(self, order=1, edited=None, edit=None):
        self.order, self.edited, self.edit = order, edited, edit
        self.started = []

    def launch(self, file, name, grid, block, arguments, shared_bytes=0):
        edit = self.edit if file == self.edited else None
        self.started.append(name)
        run_kernel(file, name, grid, block, arguments, shared_bytes, order=self.order, edit=edit)


class Shifted(FusedOps):
    """Arrays from the host begin `off` elements behind an address of 16 bytes."""

    off = 0

    def asarray(self, host):
        whole = super().asarray(np.pad(host.reshape(-1), (self.off, 0)))
        return whole[self.off :].reshape(host.shape)


class HostOps(Shifted):
    """Products are NumPy's, in float32; what else has no kernel is the plain formula."""

    takes_16_bits = tuple(one for one in FusedOps.takes_16_bits if "mul" not in one)

    def __init__(self, loader=None, dtype="float32"):
        xp = SimpleNamespace(**vars(np) | {"empty": poisoned})
        ArrayOps.__init__(self, xp, dtype, "cpu")
        self.loader, self._epilogues = loader or HostLoader(), None
        self._done, self._tables = np.zeros((0,), np.int32), {}

    def _stacked_products(self, a, b, out):
        out[...] = a.astype(np.float32) @ b.astype(np.float32)
        return out

    vars().update({name: getattr(ArrayOps, name) for name in OF_CUPY})


def host_ops(dtype="float32", *, off=0, **loader):
    """The array functions of a type on the CPU; loader: arguments of `HostLoader`."""
    ops = HostOps(HostLoader(**loader))
    ops.off = off
    return MixedOps(ops, dtype) if dtype in DTYPES else ops


def gpu_ops(dtype, off):
    """The same on a GPU."""
    ops = Shifted()
    ops.off = off
    return MixedOps(ops, dtype) if dtype in DTYPES else ops
