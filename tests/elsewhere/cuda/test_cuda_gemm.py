"""The GEMM ladder on the CPU: its unchanged sources against float64, and broken twins of them."""

import ml_dtypes
import numpy as np
import pytest
from cuda_host import run_kernel
from cuda_kernels import KERNELS

from bench.kernels import rungs
from mpipar.ops.cuda import gemm as own

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Largest relative error of one rounding, by the number of bits.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALL = {
    "naive": (),
    "shared": (8,),
    "register": (16, 32, 4, 2, 4),
    "vector": (32, 32, 8, 4, 8),
    "warp": (64, 32, 4, 32, 16),
    "mma": (32, 32, 16, 16, 32, 2),
}
ALL_LAYOUTS = (*own.LAYOUTS, "TT")
TYPES = [(rung, "float32", "float32") for rung in SMALL if rung != "mma"] + [
    ("mma", "bfloat16", "bfloat16"),
    ("mma", "bfloat16", "float32"),
    ("mma", "float16", "float16"),
]
SIZES = [(1, 1, 1), (37, 41, 29), (70, 33, 50), (32, 64, 48)]


def small(rung, dtype, out_dtype):
    """The instantiation of each layout with tiles that small products fill."""
    return {
        layout: rungs.gemm(rung, layout, dtype, out_dtype, SMALL[rung]) for layout in ALL_LAYOUTS
    }


class Product:
    """Random operands of one layout in arrays with `gap` more columns, and the expected result."""

    def __init__(self, rng, sizes, layout, dtype, out_dtype, beta=0.0, gap=0):
        self.m, self.n, self.k = sizes
        stored = (
            (self.m, self.k)[:: -1 if layout[0] == "T" else 1],
            (self.k, self.n)[:: -1 if layout[1] == "T" else 1],
        )
        self.a, self.b = (self.padded(rng, shape, gap, DTYPES[dtype]) for shape in stored)
        self.c = self.padded(rng, (self.m, self.n), gap, DTYPES[out_dtype])
        self.before, self.beta = self.c.copy(), beta
        if beta == 0.0:
            self.c[:, : self.n] = np.nan
        a, b = (
            x[:, : shape[1]].astype(np.float64)
            for x, shape in zip((self.a, self.b), stored, strict=True)
        )
        a, b = (x.T if letter == "T" else x for x, letter in zip((a, b), layout, strict=True))
        added = beta * self.before[:, : self.n].astype(np.float64)
        self.expected = a @ b + added
        self.size = np.linalg.norm(np.sqrt(np.square(a) @ np.square(b) + np.square(added)))
        self.bound = ROUNDING[out_dtype] + ROUNDING["float32"] * self.k**0.5

    @staticmethod
    def padded(rng, shape, gap, dtype):
        return rng.standard_normal((shape[0], shape[1] + gap)).astype(dtype)

    def arguments(self):
        return [
            self.m,
            self.n,
            self.k,
            self.a,
            self.a.shape[1],
            self.b,
            self.b.shape[1],
            self.beta,
            self.c,
            self.c.shape[1],
        ]

    def launch(self, kernel):
        return [
            kernel.file,
            kernel.name,
            own.grid(kernel, self.m, self.n),
            kernel.block,
            self.arguments(),
            kernel.shared_bytes,
        ]

    def error(self):
        """Norm of the error relative to that of random sums of these terms, which never cancel.

        Memory beside the columns of C must be unchanged.
        """
        assert np.array_equal(self.c[:, self.n :], self.before[:, self.n :])
        difference = self.c[:, : self.n].astype(np.float64) - self.expected
        return np.linalg.norm(difference) / self.size


@pytest.mark.shim
@pytest.mark.parametrize(("rung", "dtype", "out_dtype"), TYPES)
def test_every_layout_and_edge(rng, rung, dtype, out_dtype):
    tried = small(rung, dtype, out_dtype)
    names = tuple(kernel.name for kernel in tried.values())
    for i, (layout, kernel) in enumerate(tried.items()):
        for j, sizes in enumerate(SIZES):  # so that each layout and each size meets every way
            beta, gap, order = ((0.0, 0, 1), (1.0, 3, -1), (0.0, 8, -1))[(i + j) % 3]
            product = Product(rng, sizes, layout, dtype, out_dtype, beta, gap)
            run_kernel(*product.launch(kernel), order=order, together=names)
            error = product.error()
            assert error <= product.bound, (layout, sizes, beta, gap, error, product.bound)


@pytest.mark.shim
@pytest.mark.parametrize("file", [file for file in KERNELS if file.startswith("gemm_")])
def test_every_instantiation_that_is_used(rng, file):
    listed = {kernel.name: (kernel, case) for kernel, case in _listed()}
    for name in KERNELS[file]:
        kernel, (layout, dtype, out_dtype) = listed[name]
        product = Product(rng, (133, 65, 71), layout, dtype, out_dtype, beta=1.0)
        run_kernel(*product.launch(kernel))
        assert product.error() <= product.bound, name


def _listed():
    """Every Gemm of the ladder with the default tiles, and its case."""
    for rung, kind in rungs.RUNGS.items():
        for layout in own.LAYOUTS:
            for dtype in DTYPES if kind.typed else ("float32",):
                for out_dtype in {dtype, "float32"}:
                    kernel = rungs.gemm(rung, layout, dtype, out_dtype)
                    yield kernel, (layout, dtype, out_dtype)


@pytest.mark.shim
def test_mma_has_float32_sums(rng):
    """With twenty thousand values of one sign a sum in bfloat16 would stop growing at 256."""
    kernel = rungs.gemm("mma", "NN", "bfloat16", "float32", SMALL["mma"])
    product = Product(rng, (16, 16, 20000), "NN", "bfloat16", "float32")
    product.a[...], product.b[...] = 1.0, 1.0
    product.expected = np.full((16, 16), 20000.0)
    run_kernel(*product.launch(kernel))
    assert product.error() == 0.0


LAST = "        __syncthreads();\n    }\n"
TWINS = {
    "shared": [
        ("        __syncthreads();  // the tiles are complete\n", ""),
        ("        __syncthreads();  // and no thread reads them any more\n", ""),
    ],
    "register": [(LAST, "    }\n"), ("        __syncthreads();\n        for", "        for")],
    "vector": [(LAST, "    }\n"), ("        __syncthreads();\n        for", "        for")],
    "warp": [("        __syncthreads();  // this slot", "        // this slot")],
    "mma": [
        ("        __syncthreads();  // this step", "        // this step"),
        ("        wait_copies<Stages - 2>();\n", ""),
    ],
}


def tiny(rng, rung):
    """A product of a few tiles, two blocks high, and the instantiation for it."""
    dtype = "bfloat16" if rung == "mma" else "float32"
    kernel = rungs.gemm(rung, "NT", dtype, "float32", SMALL[rung])
    return kernel, Product(rng, (kernel.rows + 1, kernel.columns, 40), "NT", dtype, "float32")


@pytest.mark.shim
@pytest.mark.parametrize(
    ("rung", "number"),
    [(rung, number) for rung, edits in TWINS.items() for number in range(len(edits))],
)
def test_missing_barrier_gives_wrong_results(rng, rung, number):
    """The result must be wrong in at least one of the two orders of threads."""
    kernel, product = tiny(rng, rung)
    wrong = []
    for order in (1, -1):
        product.c[...] = np.nan
        run_kernel(*product.launch(kernel), order=order, edit=TWINS[rung][number])
        wrong.append(not product.error() <= product.bound)
    assert any(wrong)
