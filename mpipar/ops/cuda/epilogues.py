"""Products with an epilogue: it adds a bias, or sums up rows, in the kernel of the product.

cuBLASLt provides them; CuPy has no binding for it, so it is called through ctypes. What it refuses,
remains a product followed by a kernel. The library is the one that cuBLAS has loaded.
"""

import ctypes
import warnings
from types import ModuleType
from typing import Any, NamedTuple

from mpipar.ops.cuda.gemm import BlasGemm, checked, stored
from mpipar.ops.signature import Array, DeviceArray

BIAS, BGRADA, BGRADB = 4, 256, 512  # cublasLtEpilogue_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8  # cublasLtMatmulDescAttributes_t
MAX_WORKSPACE, MIN_ALIGNMENT = 1, 5  # the alignments of A, B, C and D follow one another
INVALID_VALUE = 7  # cublasStatus_t of a call that is wrong for any library
MOST_WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends for Hopper
MOST_ALIGNMENT = 256  # bytes; no algorithm requires more
_P, _I = ctypes.c_void_p, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_P,),
    "cublasLtMatmulDescCreate": (_P, _I, _I),
    "cublasLtMatmulDescSetAttribute": (_P, _I, _P, ctypes.c_size_t),
    "cublasLtMatrixLayoutCreate": (_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatmulPreferenceCreate": (_P,),
    "cublasLtMatmulPreferenceSetAttribute": (_P, _I, _P, ctypes.c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(_P,) * 7, _I, _P, _P),
    "cublasLtMatmul": (*(_P,) * 14, ctypes.c_size_t, _P),
}


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", _I),
        ("waves", ctypes.c_float),
        ("reserved", _I * 4),
    )


class _Plan(NamedTuple):
    """What is chosen once per shape: descriptors of the product and of its matrices."""

    product: ctypes.c_void_p
    matrices: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    found: _Found


class Epilogues:
    """Products with epilogues. blas: provides types and factors. speaks: whether to warn."""

    def __init__(self, xp: ModuleType, blas: BlasGemm, speaks: bool) -> None:
        self._xp, self._blas, self._speaks = xp, blas, speaks
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}
        self._workspace = xp.empty((0,), "uint8")
        try:  # the library of the same CUDA as CuPy's cuBLAS
            runtime = xp.cuda.runtime.runtimeGetVersion() // 1000
            self._library: Any = ctypes.CDLL(f"libcublasLt.so.{runtime}")
        except OSError as error:
            self._library = None
            self._refuse(f"cuBLASLt is missing ({error})")
            return
        for name, types in SIGNATURES.items():
            getattr(self._library, name).argtypes = types
        self._handle = self._made("cublasLtCreate")

    def _refuse(self, why: str) -> None:
        """Warn once about what cannot be done."""
        if self._speaks:
            self._speaks = False
            warnings.warn(f"{why}: kernels after the product do it", stacklevel=2)

    def __call__(
        self, a: DeviceArray, b: DeviceArray, out: DeviceArray, row: DeviceArray, *, adds: bool
    ) -> bool:
        """Write a b + row to out, or add a b to out; return whether the library can.

        a (M, K), b (K, N), out (M, N). row (N,): the bias or, if the product is added, where the
        sum of the rows of b is written. For the library b is the first operand, or the second if
        out is stored as its transpose.
        """
        assert (row.shape, row.dtype) == ((out.shape[1],), out.dtype), (row.shape, out.shape)
        if self._library is None or not out.size:
            return False
        epilogue = BIAS if not adds else BGRADB if stored(out)[0] else BGRADA
        a, b, out = checked(a, b, out)
        places = [b.data.ptr, a.data.ptr, out.data.ptr, out.data.ptr]
        aligned = tuple([min(MOST_ALIGNMENT, at & -at) for at in (*places, row.data.ptr)])
        key = (epilogue, a.shape, b.shape, *map(stored, (a, b, out)), a.dtype, out.dtype, aligned)
        if key not in self._plans:
            self._plans[key] = self._plan(epilogue, a, b, out, row, aligned)
        plan = self._plans[key]
        if plan is None:
            return False
        self._point(plan.product, row)
        need = plan.found.workspace
        if self._workspace.size < need:  # only the computing stream uses it
            self._workspace = self._xp.empty((need,), "uint8")
        zero, one = self._blas.places[a.dtype.name]
        left, right, result = plan.matrices
        self._call(
            "cublasLtMatmul",
            self._handle,
            plan.product,
            one,
            places[0],
            left,
            places[1],
            right,
            one if adds else zero,
            places[2],
            result,
            places[3],
            result,
            ctypes.byref(plan.found),
            self._workspace.data.ptr,
            need,
            self._xp.cuda.get_current_stream().ptr,
        )
        return True

    def _plan(
        self,
        epilogue: int,
        a: Array,
        b: Array,
        out: Array,
        row: Array,
        aligned: tuple[int, ...],
    ) -> _Plan | None:
        """Return the library's plan, or None if it refuses.

        As for cuBLAS, the result is out^T = b^T a^T, whose columns are the rows of out.
        """
        name, (rows, columns), inner = a.dtype.name, out.shape, a.shape[1]
        kind, out_kind = (self._blas.types[x.dtype.name] for x in (a, out))
        (a_turned, lda), (b_turned, ldb), (_, ldc) = map(stored, (a, b, out))
        product = self._made(
            "cublasLtMatmulDescCreate", self._blas.sums[name], self._blas.types["float32"]
        )
        for attribute, value in ((TRANSA, b_turned), (TRANSB, a_turned), (EPILOGUE, epilogue)):
            self._set(product, attribute, _I(value))
        self._point(product, row)
        left, right, result = (
            self._made("cublasLtMatrixLayoutCreate", one, *shape, leading)
            for one, shape, leading in (
                (kind, (inner, columns) if b_turned else (columns, inner), ldb),
                (kind, (rows, inner) if a_turned else (inner, rows), lda),
                (out_kind, (columns, rows), ldc),
            )
        )
        wishes = self._made("cublasLtMatmulPreferenceCreate")
        for attribute, size in (
            (MAX_WORKSPACE, ctypes.c_uint64(MOST_WORKSPACE)),
            *((MIN_ALIGNMENT + i, ctypes.c_uint32(one)) for i, one in enumerate(aligned[:4])),
        ):
            self._call(
                "cublasLtMatmulPreferenceSetAttribute",
                wishes,
                attribute,
                ctypes.byref(size),
                ctypes.sizeof(size),
            )
        found, count = _Found(), _I(0)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            product,
            left,
            right,
            result,
            result,
            wishes,
            1,
            ctypes.byref(found),
            ctypes.byref(count),
        )
        assert status != INVALID_VALUE, (epilogue, a.shape, b.shape)
        if status or not count.value:
            self._refuse(
                f"cuBLASLt refuses epilogue {epilogue} of {name}, {out.shape} = "
                f"{a.shape} x {b.shape}"
            )
            return None
        return _Plan(product, (left, right, result), found)

    def _point(self, product: Any, row: DeviceArray) -> None:
        """Set the address of the bias or of the sums."""
        self._set(product, BIAS_POINTER, _P(row.data.ptr))

    def _set(self, product: Any, attribute: int, value: Any) -> None:
        self._call(
            "cublasLtMatmulDescSetAttribute",
            product,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    def _made(self, function: str, *arguments: Any) -> Any:
        """Return the object that a function creates; it lives as long as the process."""
        made = _P()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise RuntimeError(f"{function}: cublasStatus_t {status}")
