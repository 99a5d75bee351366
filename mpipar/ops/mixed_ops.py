"""Sixteen-bit weights and activations on any device: widen to float32, compute, round once.

This is a wrapper around the float32 functions of NumPy, CuPy or shapes. It widens what enters a
function, which is exact, and rounds its activations to the nearest. So products accumulate in
float32, and one rounding stands between two functions. A device keeps what it does so by itself,
such as products on tensor cores (`takes_16_bits`). Gradients of parameters, statistics of norms and
softmax, losses and the optimizer are float32 and never rounded.
"""

import ml_dtypes
import numpy as np

from mpipar.ops.functions import EXACT_IN_16_BITS, FUNCTIONS, MEMORY

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

# Facts that the shapes count or the kernels go by, and copies, which change no number.
FACTS = ("flops", "live", "peak", "reset_peak", "tiled_head_width", "recorder", "copies")


def quiet(function):
    """The function without warnings: the loss scale deals with values beyond 16 bits."""
    return np.errstate(over="ignore", invalid="ignore")(function)


class MixedOps:
    """The array functions with activations in `dtype`: "bfloat16" or "float16".

    exact: the float32 functions. statistics: the type of gradients, master weights and sums.
    """

    def __init__(self, exact, dtype):
        self.exact, self.xp, self.device = exact, exact.xp, exact.device
        self.dtype, self.statistics = DTYPES[dtype], exact.dtype
        for name in (*MEMORY, *EXACT_IN_16_BITS):
            if not hasattr(MixedOps, name):
                setattr(self, name, quiet(getattr(exact, name)))
        for name in FUNCTIONS.keys() - {*EXACT_IN_16_BITS}:
            if name in exact.takes_16_bits:
                setattr(self, name, quiet(getattr(exact, name)))
            elif not hasattr(MixedOps, name):
                setattr(self, name, quiet(self._rounded(getattr(exact, name), FUNCTIONS[name])))

    def __getattr__(self, name):
        if name in FACTS:
            return getattr(self.exact, name)
        raise AttributeError(f"{name}: the table of functions does not say what becomes of 16 bits")

    def _rounded(self, function, line):
        """The function on widened arguments, with its activations rounded: results and arguments.

        out: arrays to round all results to, for a function that takes some.
        """

        def call(*arguments, out=None, **named):
            given = line.bind(arguments, named)
            wide = {name: self._wide(x) for name, x in given.items()}
            made = function(*[wide[name] for name in list(wide)[: len(arguments)]],
                            **{name: wide[name] for name in named})
            made = made if isinstance(made, tuple) else (made,)
            if out is not None:
                for to, x in zip(out, made, strict=True):
                    self.copy(to, x)
                return out
            for part in line.takes:
                if part.written and wide.get(part.name) is not given.get(part.name):
                    self.copy(given[part.name], wide[part.name])
            results = tuple(
                given[part.name] if part.name in given else self._narrow(part, x)
                for part, x in zip(line.gives, made, strict=False))
            return results if len(results) > 1 else results[0] if results else None

        return call

    def _wide(self, x):
        """x in float32 if it is an array of 16 bits."""
        return x.astype(self.statistics) if getattr(x, "dtype", None) == self.dtype else x

    def _narrow(self, part, x):
        """Result x of the exact function, rounded if it is an activation."""
        return x if part.kind else x.astype(self.dtype)

    def empty(self, shape, dtype=None, label="stash"):
        """Return an uninitialised array."""
        return self.exact.empty(shape, self.dtype if dtype is None else dtype, label)

    def zeros(self, shape, dtype=None, label="stash"):
        """Return an array of zeros."""
        return self.exact.zeros(shape, self.dtype if dtype is None else dtype, label)

    def bias_gelu_forward(self, x, b):
        """Add b (M,) to the freshly made x (..., M) in place and return GELU of the sum."""
        return self.gelu_forward(self.bias_forward(x, b))
