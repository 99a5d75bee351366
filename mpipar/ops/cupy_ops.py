"""The array functions on a GPU through CuPy: the plain ones, products, and what a device needs."""

import math
from functools import partial

import numpy as np

from mpipar.errors import EnvironmentProblem
from mpipar.ops.array_ops import ArrayOps, as_rows
from mpipar.ops.cuda.gemm import BlasGemm, TileGemm
from mpipar.ops.cuda.ladder import fitting
from mpipar.ops.cuda.loader import Loader, num_processors
from mpipar.ops.cuda.tile_model import TileModelGemm
from mpipar.ops.cupy_copies import Copies

OLDEST_CUPY = 14  # the first that knows bfloat16


class CupyOps(ArrayOps):
    """The array functions of `ArrayOps` on a CUDA device, which becomes the current one.

    gemm: products with weights by "blas" (cuBLAS), "tile" (the kernels of ops/cuda) or "cuda-tile"
    (the one that the package of that name compiles). The last two do not take float64. tf32: cuBLAS
    may round float32 operands of products to 10 bits of mantissa.
    host_rank: this process's place on its host, which gives the number of its GPU. If there are
    fewer GPUs, the count starts again at 0.

    copies: those beside the computing stream. All groups of a rank share them.

    Products take operands of 16 bits as they are, whatever `dtype` is.
    Raises EnvironmentProblem when CuPy, cuda-tile or a usable GPU is missing.
    """

    takes_16_bits = ("matmul", "matmul_nt", "matmul_tn_add")
    checksum_block = 1 << 22  # few kernels, 64 MiB in between

    def __init__(self, dtype, gemm="blas", tf32=False, host_rank=0):
        super().__init__(_usable_cupy(host_rank), dtype, "cuda")
        assert gemm == "blas" or (self.dtype != np.float64 and not tf32), (gemm, dtype, tf32)
        self.copies = Copies(self.xp, self.pinned)
        self._blas = BlasGemm(self.xp, tf32)
        if gemm == "blas":
            self._gemm = self._blas
        elif gemm == "tile":
            self._gemm = TileGemm(Loader(self.xp), partial(fitting, num_processors(self.xp)))
        else:
            assert gemm == "cuda-tile", gemm
            self._gemm = TileModelGemm(self.xp, cuda_tile())

    def matmul(self, x, w):
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        y = self.xp.empty((*x.shape[:-1], w.shape[1]), x.dtype)
        self._gemm(as_rows(x), w, as_rows(y))
        return y

    def matmul_nt(self, x, w):
        """Return x w^T: (..., M) and (K, M) give (..., K)."""
        return self.matmul(x, w.T)

    def matmul_tn_add(self, x, y, out):
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view."""
        self._gemm(as_rows(x).T, as_rows(y), out, accumulate=True)

    def _stacked_products(self, a, b, out=None):
        """Return a b for every leading index. cuBLAS makes one call per row of the batch, without
        copies.
        """
        if out is None:
            out = self.xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
        for i in range(len(a)):
            self._blas.stacked(a[i], b[i], out[i])
        return out

    def to_host(self, x):
        """Return x copied to a NumPy array; waits for the device."""
        return self.xp.asnumpy(x)

    def pinned(self, shape, dtype):
        """Return an uninitialised host array in page-locked memory, where copies run fastest."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        memory = self.xp.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def to_pinned(self, x):
        """Return x copied to page-locked host memory; waits for the device."""
        host = self.pinned(x.shape, x.dtype)
        x.get(out=host)
        return host

    def synchronize(self):
        """Wait until everything queued on the current stream is done."""
        self.xp.cuda.get_current_stream().synchronize()


def cuda_tile():
    """Return the module cuda.tile."""
    try:
        import cuda.tile
    except ImportError as error:
        raise EnvironmentProblem(
            f"--gemm cuda-tile needs the package cuda-tile, which cannot be imported here "
            f"({error}): install it with pip install '.[tile]', or leave --gemm out"
        ) from error
    return cuda.tile


def _usable_cupy(host_rank):
    """Return the module cupy after one small computation on this process's device."""
    try:
        import cupy
    except ImportError as error:
        raise EnvironmentProblem(
            f"--device cuda needs CuPy, which cannot be imported here ({error}): install it with "
            "pip install '.[cuda]' (CUDA 12: '.[cuda12]'), or type --device cpu"
        ) from error
    if int(cupy.__version__.split(".")[0]) < OLDEST_CUPY:
        raise EnvironmentProblem(
            f"--device cuda needs CuPy {OLDEST_CUPY} or newer, and CuPy {cupy.__version__} is "
            "installed: pip install --upgrade '.[cuda]' (CUDA 12: '.[cuda12]'), or type "
            "--device cpu")
    try:
        # A driver alone is not enough: a missing CUDA library or a too new GPU stops a compiled
        # kernel and a product. CUDA errors are RuntimeErrors; a library that cannot be loaded
        # raises one of the rest.
        # Without any GPU, taking the first raises an error that says so.
        cupy.cuda.Device(host_rank % max(1, cupy.cuda.runtime.getDeviceCount())).use()
        square = cupy.ones((2, 2))
        float((square @ square).sum())
    except (RuntimeError, OSError, ImportError) as error:
        raise EnvironmentProblem(
            f"--device cuda needs a usable GPU, and CuPy cannot compute on one here ({error}): "
            "start on a node with a GPU and its driver, or type --device cpu"
        ) from error
    return cupy
