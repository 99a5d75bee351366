"""Benchmarks: each one first checks that the data is right, then times it.

They run from the root of a clone: `python -m bench NAME`, or `python -m bench.NAME`. NAME is a file
here, or a folder whose program is `__main__.py`. `python -m bench` lists all. Code that programs
share is in those folders.
"""

import os

from mpipar.run.process.environment import choose_kernels, keep_heap, presets

# This must come before a benchmark imports NumPy: BLAS reads its kernels and its number of threads
# once, and the ranks of a host share its cores. mpipar's own commands have the guard, which imports
# NumPy later.
choose_kernels(os.environ)
os.environ.update(presets(os.environ, len(os.sched_getaffinity(0))))
keep_heap()
