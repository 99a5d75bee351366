"""What a layer costs one rank for one microbatch, in letters: products, bytes kept, barriers.

A Sum says how often each product of letters counts: {("B", "T", "D", "e"): 4} is 4*B*T*D*e. Each
letter stands for a size, and a model's `letters` gives the sizes of a rank. So one form is a text
for readers, and a number for each layout, also for one that the planner only thinks of. A small
letter is a rank's piece: f of F, d of D, v of V. t are its tokens where T are cut between products.
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
    """Return a product of letters, such as "B*T*s", so many times."""
    return {tuple(letters.split("*")): often}


def array(rows: str, widths: str, number: str = "e") -> Sum:
    """Return the bytes of an array. rows: such as "B*T". widths: letters that lie side by side, as
    in "QKK".

    number: the letter of a number's bytes, e or s.
    """
    return total(term(f"{rows}*{width}*{number}") for width in widths)


def total(sums: Iterable[Sum]) -> Sum:
    """Return all sums as one."""
    found: Counter[tuple[str, ...]] = Counter()
    for one in sums:
        found.update(one)
    return found


def value(form: Sum, letters: Letters) -> float:
    """Return the number that a Sum is for these sizes."""
    found: float = 0
    for one, product in form.items():  # loops, because the planner asks a million times
        for letter in one:
            product *= letters[letter]  # noqa: PLW2901
        found += product
    return found


class Kind(NamedTuple):
    """How a kind of barrier goes in a group of q ranks.

    operations: of its records. rounds: how often each takes place. pieces: what one operation
    carries, in what the Barrier says.
    """

    operations: tuple[str, ...]
    rounds: Callable[[int], int]
    pieces: Callable[[int], float]


def once(_q: int) -> int:
    """One, for a group of any size."""
    return 1


def all_of(q: int) -> int:
    """As many as the group has ranks."""
    return q


KINDS = {
    "all_reduce": Kind(("all_reduce",), once, once),
    "all_gather": Kind(("all_gather",), once, all_of),
    "reduce_scatter": Kind(("reduce_scatter",), once, all_of),
    "all_to_all": Kind(("all_to_all",), once, once),
    "all_to_allv": Kind(("all_to_allv",), once, lambda q: (q - 1) / q),  # of equal parts
    "ring": Kind(("send", "recv"), lambda q: q - 1, once),
    "ring_home": Kind(("send", "recv"), all_of, once),  # the last message brings a sum home
}


class Barrier(NamedTuple):
    """A barrier of a microbatch. name: of its records, * for a block's number. phase: F, I or W.

    carries: bytes of a sum or of an exchange; where pieces travel, of one of them. again: whether
    a block that runs forward again for its backward crosses it, too.
    """

    name: str
    phase: str
    kind: str
    carries: Sum
    axis: str = "tp"
    again: bool = False

    def calls(self, q: int) -> int:
        """Return how many operations it is on each rank."""
        way = KINDS[self.kind]
        return way.rounds(q) * len(way.operations)

    def payload(self, letters: Letters, q: int) -> float:
        """Return the bytes of one operation's payload."""
        return KINDS[self.kind].pieces(q) * value(self.carries, letters)

    def sent(self, letters: Letters, q: int) -> int:
        """Return the bytes that a rank sends."""
        way = KINDS[self.kind]
        return way.rounds(q) * wire_bytes(
            way.operations[0], int(self.payload(letters, q)), q)


class Cost(NamedTuple):
    """What one or several layers cost.

    products: (rows, inner, outer) of each product of a forward, with letters side by side as in
    `array`. The gradients of its inputs and weights are products of the same FLOPs. weights:
    numbers in their weights. flops: FLOPs of a forward. attention: those of attention among them.
    stash: bytes kept from F to I. kept: from I to W. remade: bytes of what backward makes again
    from the stash, where others would keep it. barriers: in the order of the layers.
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
        total(one.weights for one in costs), total(one.flops for one in costs),
        total(one.attention for one in costs), total(one.stash for one in costs),
        total(one.kept for one in costs), total(one.remade for one in costs),
        tuple(barrier for one in costs for barrier in one.barriers))


def sides(cut: str, inner: str, outer: str) -> dict[str, tuple[str, str]]:
    """{x or y: (letters of a rank's matrix on this side, letters of its array there)}.

    A cut that gathers one side by width leaves the whole array on every rank.
    """
    one, widths = CUTS[cut], [inner, outer]
    widths[one.shard_axis] = widths[one.shard_axis].translate(PIECES)
    gathered = {side for _, kind, side in one.barriers
                if kind == "all_gather" and not one.tokens_are_cut}
    return {side: (own, whole if side in gathered else own)
            for side, own, whole in zip("xy", widths, (inner, outer), strict=True)}


def product_cost(name: str, cut: str, inner: str, outer: str, rows: str = "B*T", *,
                 patch: str = "", again: bool = True) -> Cost:
    """Return the Cost of a product and its cut. inner, outer: letters of its whole widths.

    patch: what the rows of the product's matrix have besides `inner`, of a convolution. again: see
    Barrier.
    """
    one, widths = CUTS[cut], sides(cut, inner, outer)
    held = "B*t" if one.tokens_are_cut else rows
    # A cut that gathers x once more for the weight gradient keeps only its own tokens of x.
    pieces = any(phase == "W" for phase, *_ in one.barriers)
    x, y = array(held if pieces else rows, widths["x"][1]), array(rows, widths["y"][1])
    pairs = [(one, other) for one in widths["x"][0] for other in widths["y"][0]]
    return Cost(
        ((rows + patch, widths["x"][0], widths["y"][0]),),
        total(term("*".join(pair)) for pair in pairs),
        total(term(f"{rows}{patch}*{'*'.join(pair)}", 2) for pair in pairs),
        stash=x, kept=total((x, y)),
        barriers=tuple(Barrier(name, phase, kind, array(held, widths[side][0]),
                               again=again and phase == "F")
                       for phase, kind, side in one.barriers))


def token_barriers(name: str, held: type[WholeTokens], *, scatter: str, gather: str,
                   rows: str = "B*T") -> tuple[Barrier, ...]:
    """Return the barriers of a layer that gathers the tokens held in one phase, and scatters in
    another.

    rows: letters of all rows, which are those of all tokens, or of images.
    """
    kinds = {scatter: held.scatters, gather: held.gathers}
    return tuple(Barrier(name, phase, kind, array(rows.replace("B*T", held.rows), "D"))
                 for phase, kind in sorted(kinds.items()) if kind)
