"""A training step, beside the same model in PyTorch."""

import sys

from bench.step import freed

# This must come before NumPy, whose BLAS reads its choice of loops once; see bench/__init__.py.
if freed.FLAG in sys.argv:
    freed.free_openblas()
