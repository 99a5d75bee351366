"""A training step, compared with the same model in PyTorch."""

import sys

from bench.step import blas

# This must come before NumPy, whose BLAS chooses its kernels once; see bench/__init__.py.
if blas.FLAG in sys.argv:
    blas.free_openblas()
