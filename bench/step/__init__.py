"""A training step, beside the same model in PyTorch."""

import sys

from bench.step import blas

# This must come before NumPy, whose BLAS reads its choice of loops once; see bench/__init__.py.
if blas.FLAG in sys.argv:
    blas.free_openblas()
