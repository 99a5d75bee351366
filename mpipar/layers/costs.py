"""The cost of a layer per rank and microbatch, in letters: products, bytes kept, barriers.

A Sum is a sum of products of letters with their coefficients: {("B", "T", "D", "e"): 4} is
4*B*T*D*e. Each letter stands for a size, and a model's `letters` returns the sizes on a rank. One
form thus serves as a text for readers and as a number for each layout, including those that the
planner only considers. A lower-case letter is a rank's piece: f of F, d of D, v of V, and t of T
where tokens are cut between products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mpipar.comm.record import wire_bytes
from mpipar.partition import CUTS
from mpipar.partition.tokens import WholeTokens

Sum = Mapping[tuple[str, ...], float]
Letters = Mapping[str, float]
NOTHING: Sum = Counter()
PIECES = str.maketrans("DFV", "dfv")


def term(letters: str, often: float = 1) -> Sum:
    """Return a product of letters, such as "B*T*s", with the coefficient `often`."""
    return {tuple(letters.split("*")): often}


def array(rows: str, widths: str, number: str = "e") -> Sum:
    """Return the bytes of an array of `rows`, such as "B*T", and widths side by side, as in "QKK".

    number: the letter of a number's bytes, e or s.
    """
    return total(term(f"{rows}*{width}*{number}") for width in widths)


def total(sums: Iterable[Sum]) -> Sum:
    """Return the total of all sums."""
    found: Counter[tuple[str, ...]] = Counter()
    for one in sums:
        found.update(one)
    return found


def value(form: Sum, letters: Letters) -> float:
    """Return the value of a Sum for these sizes."""
    found: float = 0
    for one, product in form.items():  # loops, because the planner calls this often
        for letter in one:
            product *= letters[letter]  # noqa: PLW2901
        found += product
    return found


class Kind(NamedTuple):
    """How a kind of barrier is carried out in a group of q ranks.

    operations: those that it records. rounds: how often each takes place. pieces: the payload of
    one operation, as a multiple of what the Barrier carries.
    """

    operations: tuple[str, ...]
    rounds: Callable[[int], int]
    pieces: Callable[[int], float]


def once(_q: int) -> int:
    """Return 1, for a group of any size."""
    return 1


def all_of(q: int) -> int:
    """Return the number of ranks in the group."""
    return q


KINDS = {
    "all_reduce": Kind(("all_reduce",), once, once),
    "all_gather": Kind(("all_gather",), once, all_of),
    "reduce_scatter": Kind(("reduce_scatter",), once, all_of),
    "all_to_all": Kind(("all_to_all",), once, once),
    "all_to_allv": Kind(("all_to_allv",), once, lambda q: (q - 1) / q),  # for equal parts
    "ring": Kind(("send", "recv"), lambda q: q - 1, once),
    "ring_home": Kind(("send", "recv"), all_of, once),  # the last message brings a sum home
}


class Barrier(NamedTuple):
    """A barrier of a microbatch. name: of its records, * for a block's number. phase: F, I or W.

    carries: bytes of a sum or of an exchange; where pieces travel, those of one piece. again:
    whether a block that recomputes its forward pass crosses it once more.
    """

    name: str
    phase: str
    kind: str
    carries: Sum
    axis: str = "tp"
    again: bool = False

    def calls(self, q: int) -> int:
        """Return how many operations it takes on each rank."""
        way = KINDS[self.kind]
        return way.rounds(q) * len(way.operations)

    def payload(self, letters: Letters, q: int) -> float:
        """Return the bytes of one operation's payload."""
        return KINDS[self.kind].pieces(q) * value(self.carries, letters)

    def sent(self, letters: Letters, q: int) -> int:
        """Return the bytes that a rank sends."""
        way = KINDS[self.kind]
        return way.rounds(q) * wire_bytes(way.operations[0], int(self.payload(letters, q)), q)


class Cost(NamedTuple):
    """What one or several layers cost.

    products: (rows, inner, outer) of each product of a forward pass, with letters side by side as
    in `array`; the gradients of its inputs and weights are products of the same FLOPs. weights:
    numbers in the weights. flops: FLOPs of a forward pass. attention: those of attention among
    them. stash: bytes kept from F to I. kept: from I to W. remade: bytes that backward recomputes
    from the stash where they could also be kept. barriers: in the order of the layers.
    """

    products: tuple[tuple[str, str, str], ...] = ()
    weights: Sum = NOTHING
    flops: Sum = NOTHING
    attention: Sum = NOTHING
    stash: Sum = NOTHING
    kept: Sum = NOTHING
    remade: Sum = NOTHING
    barriers: tuple[Barrier, ...] = ()


def together(*costs: Cost) -> Cost:
    """Return the Cost of several layers."""
    return Cost(
        tuple(product for one in costs for product in one.products),
        total(one.weights for one in costs),
        total(one.flops for one in costs),
        total(one.attention for one in costs),
        total(one.stash for one in costs),
        total(one.kept for one in costs),
        total(one.remade for one in costs),
        tuple(barrier for one in costs for barrier in one.barriers),
    )


def sides(cut: str, inner: str, outer: str) -> dict[str, tuple[str, str]]:
    """Return {x or y: (letters of a rank's matrix on this side, letters of its array there)}.

    A cut that gathers one side by width leaves the whole array on every rank.
    """
    one, widths = CUTS[cut], [inner, outer]
    widths[one.shard_axis] = widths[one.shard_axis].translate(PIECES)
    gathered = {
        side for _, kind, side in one.barriers if kind == "all_gather" and not one.tokens_are_cut
    }
    return {
        side: (own, whole if side in gathered else own)
        for side, own, whole in zip("xy", widths, (inner, outer), strict=True)
    }


def product_cost(
    name: str,
    cut: str,
    inner: str,
    outer: str,
    rows: str = "B*T",
    *,
    again: bool = True,
) -> Cost:
    """Return the Cost of a product and its cut. inner, outer: letters of its whole widths.

    again: see Barrier.
    """
    one, widths = CUTS[cut], sides(cut, inner, outer)
    held = "B*t" if one.tokens_are_cut else rows
    # A cut that gathers x again for the weight gradient keeps only its own tokens of x.
    pieces = any(phase == "W" for phase, *_ in one.barriers)
    x, y = array(held if pieces else rows, widths["x"][1]), array(rows, widths["y"][1])
    pairs = [(one, other) for one in widths["x"][0] for other in widths["y"][0]]
    return Cost(
        ((rows, widths["x"][0], widths["y"][0]),),
        total(term("*".join(pair)) for pair in pairs),
        total(term(f"{rows}*{'*'.join(pair)}", 2) for pair in pairs),
        stash=x,
        kept=total((x, y)),
        barriers=tuple(
            Barrier(name, phase, kind, array(held, widths[side][0]), again=again and phase == "F")
            for phase, kind, side in one.barriers
        ),
    )


def token_barriers(
    name: str, held: type[WholeTokens], *, scatter: str, gather: str, rows: str = "B*T"
) -> tuple[Barrier, ...]:
    """Return the barriers of a layer that gathers held tokens in one phase and scatters in another.

    rows: letters of all rows.
    """
    kinds = {scatter: held.scatters, gather: held.gathers}
    return tuple(
        Barrier(name, phase, kind, array(rows.replace("B*T", held.rows), "D"))
        for phase, kind in sorted(kinds.items())
        if kind
    )
