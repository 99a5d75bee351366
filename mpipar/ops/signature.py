"""The lines that declare an array function's arguments, results and shapes, and their parser.

Three readers share the lines of `array_ops`: `numpy_ops` works in blocks of rows that stay in
cache, `shape_ops` makes results of the right shape, and `mixed_ops` rounds activations to 16 bits.
What they have to know besides stands with the line; see `shapes`.

A line reads "arguments -> results". `x[..K]` is an array: `..` stands for all leading dimensions
and each letter for one. A letter has one size throughout a line; a digit is a size. `eps` is not an
array, and `count=K` is a size. Marks of an argument: the function writes to it (`+`), or it may be
missing (`?`).

A result with an argument's name is that argument. Any other result is an activation, of the type of
the first argument with real numbers, unless a mark says otherwise: `:sum` the type of sums,
`:float64`, `:int64`, `:host` a Python number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike

# Of NumPy, as which types know it: CuPy's and those of shapes have what layers use of it.
Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
DeviceArray: TypeAlias = Any  # of CuPy, where only its own attributes will do
Dtype: TypeAlias = DTypeLike
Shape: TypeAlias = tuple[int, ...]
ThreeArrays: TypeAlias = tuple[Array, Array, Array]
Runs: TypeAlias = Sequence[tuple[bool, slice]]  # of a flat buffer: whether its weights decay
Method = TypeVar("Method", bound=Callable[..., Any])

DIMS = re.compile(r"\.\.|\w")
PART = re.compile(r"(\w+)(?:\[([\w.]*)\])?(\+?)(\??)(?:=(\w))?(?::(\w+))?")
DIGITS = {str(size): size for size in range(10)}


class Part(NamedTuple):
    """An argument or a result. dims: ("..", "K"), or None if it is not an array. kind: its mark."""

    name: str
    dims: tuple[str, ...] | None
    written: bool
    optional: bool
    size: str
    kind: str

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the Part that a word of a line describes."""
        found = PART.fullmatch(text)
        assert found, text
        name, letters, written, optional, size, kind = found.groups()
        dims = None if letters is None else tuple(DIMS.findall(letters))
        return cls(name, dims, bool(written), bool(optional), size or "", kind or "")

    @property
    def by_row(self) -> bool:
        """Whether its leading dimensions are the rows of a function of rows."""
        return self.dims is not None and self.dims[:1] == ("..",)

    def lengths(self, x: Any) -> tuple[Any, ...]:
        """Return the size of each of `dims`, a tuple for `..`, or the one size that x is."""
        if self.dims is None:
            return (x,)
        shape = tuple(x.shape)
        if ".." in self.dims:
            at, rest = self.dims.index(".."), len(self.dims) - 1
            end = at + len(shape) - rest
            shape = (*shape[:at], shape[at:end], *shape[end:])
        return shape


class Function(NamedTuple):
    """A line, parsed, and what stands with it: see `shapes`.

    makes: the results that are new, rather than arguments.
    """

    name: str
    text: str
    takes: tuple[Part, ...]
    gives: tuple[Part, ...]
    makes: tuple[Part, ...]
    rows: bool
    exact: bool
    flops: str

    def bind(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return name -> argument for a call."""
        names = [part.name for part in self.takes]
        given: dict[str, Any] = {**dict(zip(names, arguments, strict=False)), **named}
        missing = [part.name for part in self.takes if not (part.optional or part.name in given)]
        if missing or len(arguments) + len(named) != len(given) or not given.keys() <= set(names):
            raise TypeError(
                f"{self.name} takes {self.text}: {len(arguments)} arguments and "
                f"{list(named)} were given"
            )
        return given

    def arrays(self, given: Mapping[str, Any]) -> list[tuple[Part, Array]]:
        """Return [(Part, array)] for the arguments of a call that are arrays."""
        return [
            (part, given[part.name])
            for part in self.takes
            if part.dims is not None and given.get(part.name) is not None
        ]

    def sizes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return letter -> size for the arguments of a call, which must be consistent."""
        sizes: dict[str, Any] = dict(DIGITS)
        fits = True
        for part in self.takes:
            x, letters = given.get(part.name), part.dims or part.size
            if x is not None and letters:
                lengths = part.lengths(x)
                fits &= len(lengths) == len(letters)
                for letter, length in zip(letters, lengths, strict=False):
                    fits &= sizes.setdefault(letter, length) == length
        assert fits, (
            f"{self.name}: shapes {', '.join(str(tuple(x.shape)) for _, x in self.arrays(given))}"
            f" do not fit {self.text}"
        )
        return sizes


def shape_of(dims: Iterable[str], sizes: Mapping[str, Any]) -> Shape:
    """Return the shape that letters stand for."""
    shape: Shape = ()
    for letter in dims:
        length = sizes[letter]
        shape += length if isinstance(length, tuple) else (length,)
    return shape


def answer(results: Sequence[Any]) -> Any:
    """Return what a function with these results returns: a tuple if there are several."""
    return tuple(results) if len(results) > 1 else results[0] if results else None


def shapes(
    text: str, *, rows: bool = False, exact: bool = False, flops: str = ""
) -> Callable[[Method], Method]:
    """Return the decorator that gives a function its line, in its attribute `function`.

    rows: any rows of the results need only the same rows of the arguments. exact: it takes 16-bit
    operands as they are, since it moves values, adds two numbers of one type (which rounds once),
    or works on arrays that are float32 anyway. flops: the floating-point operations of products, as
    the digits and sizes that are multiplied.
    """
    takes, gives = (tuple(map(Part.parse, side.split())) for side in text.split("->"))
    makes = tuple(part for part in gives if part.name not in {one.name for one in takes})

    def declare(declared: Method) -> Method:
        declared.function = Function(  # type: ignore[attr-defined]
            declared.__name__, text, takes, gives, makes, rows, exact, flops
        )
        return declared

    return declare


def memory(declared: Method) -> Method:
    """Declare a function that allocates arrays or copies them to the host: its line is empty."""
    return shapes("->", exact=True)(declared)
