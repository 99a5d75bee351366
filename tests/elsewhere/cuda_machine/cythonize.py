"""Turns one of CuPy's .pyx files into C++, with the settings of CuPy's own build.

    python cythonize.py cupy_backends/cuda/api/runtime    (in CuPy's unpacked source)

`build.py` calls it.
"""

import sys

import Cython
from Cython.Compiler.Main import CompilationOptions, compile_single, default_options

name = sys.argv[1]
options = CompilationOptions(
    default_options,
    cplus=True,
    language_level=3,
    compiler_directives={
        "embedsignature": True,
        "c_api_binop_methods": True,
        "binding": False,
        "freethreading_compatible": True,
        "language_level": 3,
    },
    compile_time_env={
        "CUPY_USE_CUDA_PYTHON": False,
        "CUPY_CUFFT_STATIC": False,
        "CUPY_CYTHON_VERSION": Cython.__version__,
        "CUPY_CUDA_VERSION": 13000,
        "CUPY_HIP_VERSION": 0,
    },
)
result = compile_single(f"{name}.pyx", options, name.replace("/", "."))
sys.exit(1 if result.num_errors else 0)
