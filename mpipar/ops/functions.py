"""The table of array functions, and the base class of implementations that do not use the formulas.

`array_ops` has the definition of each function, with a line that states its shapes (`signature`).
This module has what several readers of these lines need in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.signature import Function

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


# The functions that allocate or move memory, and those that compute.
MEMORY = [name for name, function in DECLARED.items() if function.text == "->"]
FUNCTIONS = {name: function for name, function in DECLARED.items() if name not in MEMORY}
# Two functions in sequence, which a device may have as one that rounds once.
EPILOGUES = ("matmul_bias", "matmul_tn_add_sums")


def by_kernel(name: str) -> Callable[..., Any]:
    """Return the method that computes a function by one call of `_run`.

    That gets the parsed line, the arguments, new arrays for the results, whose shapes follow from
    the first argument, and for each of these the number of dimensions besides the leading ones,
    None if it has no leading ones. This is prepared once, because a call takes microseconds.
    """
    function = FUNCTIONS[name]
    names, letters = [part.name for part in function.takes], function.takes[0].dims or ()
    # (kind, whether it has the shape of the first argument, sizes besides the leading ones: a
    # number, or which dimension of the first argument)
    made = [
        (
            part.kind,
            part.dims == letters,
            [
                int(letter) if letter.isdigit() else letters.index(letter) - len(letters)
                for letter in (part.dims or ())[1:]
            ],
        )
        for part in function.makes
    ]
    inner = [
        len(part.dims or ()) - 1 if part.by_row else None
        for part in (*function.takes, *function.makes)
    ]

    @wraps(getattr(ArrayOps, name))
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != len(names):
            given = function.bind(arguments, named)
            arguments = tuple([given.get(one) for one in names])
        x = arguments[0]
        shape = x.shape
        rows = shape[: len(shape) - len(letters) + 1]
        results = [
            self.xp.empty(
                shape if same else (*rows, *[one if one > 0 else shape[one] for one in own]),
                self.dtype if kind else x.dtype,
            )
            for kind, same, own in made
        ]
        self._run(function, arguments, results, inner)
        return tuple(results) if len(results) > 1 else results[0] if results else None

    return method
