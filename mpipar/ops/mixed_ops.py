"""Sixteen-bit weights and activations on any device: widen to float32, compute, round once.

This is a wrapper around the float32 functions of NumPy, CuPy or shapes. It widens the arguments of
a function, which is exact, and rounds its activations to nearest, so that products accumulate in
float32 and one rounding separates two functions. Where a device does so by itself, as in products
on tensor cores, it is left to the device (`takes_16_bits`). Gradients of parameters, statistics of
norms and softmax, losses and the optimizer are float32 and never rounded.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.functions import DECLARED, EPILOGUES, Ops
from mpipar.ops.signature import Array, Function, Part, Shape, answer

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

# Facts that the shapes count or the kernels depend on, and copies, which change no number.
FACTS = (
    "flops",
    "live",
    "peak",
    "reset_peak",
    "tiled_head_width",
    "table_multiple",
    "recorder",
    "copies",
)


class MixedOps(Ops):
    """The array functions with activations in `dtype`: "bfloat16" or "float16".

    exact: the float32 functions. accum_dtype: the type of gradients, master weights and sums.
    """

    def __init__(self, exact: Ops, dtype: str) -> None:
        self.exact, self.xp, self.device = exact, exact.xp, exact.device
        self.dtype, self.accum_dtype = DTYPES[dtype], exact.dtype
        self._as_they_are = {name for name, function in DECLARED.items() if function.exact}
        self._as_they_are.update(exact.takes_16_bits)

    def __getattr__(self, name: str) -> Any:
        if name in FACTS:
            return getattr(self.exact, name)
        raise AttributeError(f"{name}: the table of functions does not say what becomes of 16 bits")

    # The loss scale deals with values beyond the range of 16 bits.
    @np.errstate(over="ignore", invalid="ignore")
    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        exact = getattr(self.exact, function.name)
        if function.name in self._as_they_are:
            return exact(*arguments, **named)
        if function.name in EPILOGUES:  # of functions here, each of which rounds
            return getattr(ArrayOps, function.name)(self, *arguments, **named)
        return self._rounded(exact, function, arguments, named)

    def _rounded(
        self,
        exact: Callable[..., Any],
        function: Function,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """Return a function's results for widened arguments; round activations among both.

        out: arrays to round all results to, for a function that takes some.
        """
        out = named.pop("out", None)
        given = function.bind(arguments, named)
        wide = {name: self._wide(x) for name, x in given.items()}
        made = exact(**wide)
        made = made if isinstance(made, tuple) else (made,)
        if out is not None:
            for to, x in zip(out, made, strict=True):
                self.copy(to, x)
            return out
        for part in function.takes:
            if part.written and wide.get(part.name) is not given.get(part.name):
                self.copy(given[part.name], wide[part.name])
        return answer(
            [
                given[part.name] if part.name in given else self._narrow(part, x)
                for part, x in zip(function.gives, made, strict=False)
            ]
        )

    def _wide(self, x: Any) -> Any:
        """Return x in float32 if it is a 16-bit array."""
        return x.astype(self.accum_dtype) if getattr(x, "dtype", None) == self.dtype else x

    def _narrow(self, part: Part, x: Array) -> Array:
        """Return result x of the exact function, rounded if it is an activation."""
        return x if part.kind else x.astype(self.dtype)

    def empty(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return an uninitialised array."""
        return self.exact.empty(shape, self.dtype if dtype is None else dtype, label)

    def zeros(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return an array of zeros."""
        return self.exact.zeros(shape, self.dtype if dtype is None else dtype, label)
