"""The table of array functions, and the base class of implementations that do not use the formulas.

`array_ops` has the definition of each function, with a line that states its shapes (`signature`).
This module has what several readers of these lines need in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.signature import DIMS, Function, shape_of

DECLARED: dict[str, Function] = {
    name: method.function
    for part in reversed(ArrayOps.__mro__)
    for name, method in vars(part).items()
    if hasattr(method, "function")
}


def by_call(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that passes a call of a function to `_call`."""
    function = DECLARED[formula.__name__]

    @wraps(formula)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._call(function, arguments, named)

    return method


if TYPE_CHECKING:
    # Whatever computes, layers and models call the functions of `ArrayOps`, as it declares them.
    Ops: TypeAlias = ArrayOps
else:

    class Ops:
        """All array functions, each of them computed by `_call` unless a method replaces it.

        Neither the formulas of `ArrayOps` nor anything else of it is inherited.
        """

        vars().update({name: by_call(getattr(ArrayOps, name)) for name in DECLARED})

        def _call(self, function, arguments, named):
            """Return the result of a function that has no method of its own."""
            raise TypeError(f"{type(self).__name__} has no {function.name}")


MEMORY = [name for name, function in DECLARED.items() if function.text == "->"]
FUNCTIONS = {name: function for name, function in DECLARED.items() if name not in MEMORY}
# Two functions in sequence, which a device may have as one that rounds once.
EPILOGUES = ("matmul_bias", "matmul_tn_add_sums")
# FLOPs: a number and the sizes that it is multiplied by.
FLOPS = dict.fromkeys(("matmul", "matmul_nt", "matmul_tn_add", *EPILOGUES), "2..KM")
FLOPS |= dict.fromkeys(("grouped_matmul", "grouped_matmul_nt", "grouped_matmul_tn_add"), "2RKM")
FLOPS |= dict.fromkeys(
    ("router_forward", "router_backward_input", "router_backward_weight"), "2NED"
)
# These take 16-bit operands as they are. They move values, add two numbers of one type
# (which rounds once), or work on arrays that are float32 anyway.
EXACT_IN_16_BITS = (
    "fill",
    "copy",
    "scale",
    "accumulate",
    "bias_forward",
    "embedding_forward",
    "sum",
    "square_sum",
    "checksum",
    "attention_merge",
    "cross_entropy_combine",
    "sign_step",
    "sgd_step",
    "adamw_step",
    "adamw_runs",
)


def flops(name: str, sizes: Mapping[str, Any]) -> int:
    """Return the floating-point operations of a call of a product, 0 of other functions."""
    return prod(shape_of(DIMS.findall(FLOPS[name]), sizes)) if name in FLOPS else 0
