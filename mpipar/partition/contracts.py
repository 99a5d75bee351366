"""The interfaces of this folder as types: the cuts of a product, and attention over cp.

A cut is a module, or an object, with three functions. Its barriers are visible lines in them:

    forward(here, x, w)             -> y
    backward_input(here, dy, w)     -> dx, dy as backward_weight wants it
    backward_weight(here, x, dy, dw)   dw += x^T dy

here: what this rank computes and sends with, see `Here`. w (K, N) is this rank's shard. If the
group does not divide a width, every shard has the size of the first, and the last ones are padded
with zeros, which change no product (see chunks.py).
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from mpipar.comm.group import Comm
from mpipar.data.rows import Batch
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, ThreeArrays

Saved: TypeAlias = tuple[Array, ...]  # what the backward pass needs from the forward pass
Out: TypeAlias = ThreeArrays  # arrays that a function writes to
Group = TypeVar("Group")


class Sizes(NamedTuple):
    """The sizes of a product before it is cut: x (.., tokens, inner), w (inner, outer).

    tokens: 0 if the cut does not divide the tokens.
    """

    tokens: int
    inner: int
    outer: int


class Mesh(NamedTuple):
    """A rank's groups: its row and column of the q x q grid, and its counterparts in other grids.

    row.index counts along N (and K of x). column.index counts along the rows of x (and K of w).
    depth: the ranks at the same place of each grid, for the 2.5d cut.
    """

    row: Comm
    column: Comm
    depth: Comm


class OnRank(NamedTuple, Generic[Group]):
    """What a cut of one product works with on this rank.

    ops: all array functions. comm: the group or, for the cuts of MESH_CUTS, a `Mesh` of groups.
    name: of the barriers. sizes: those of the uncut product; only the cuts that join pieces read
    them (gather, reduce, *_sp, *_ring).
    """

    ops: Ops
    comm: Group
    name: str
    sizes: Sizes


Here: TypeAlias = OnRank[Comm]
HereOnMesh: TypeAlias = OnRank[Mesh]


class Cut(Protocol[Group]):
    """The three functions of a cut over a Comm or a Mesh; see the top of this file."""

    def forward(self, here: OnRank[Group], x: Array, w: Array, /) -> Array: ...

    def backward_input(
        self, here: OnRank[Group], dy: Array, w: Array, /
    ) -> tuple[Array, Array]: ...

    def backward_weight(self, here: OnRank[Group], x: Array, dy: Array, dw: Array, /) -> None: ...


class LayerCut(Cut[Comm], Protocol):
    """A cut that a layer can choose. It declares three facts.

    shard_axis: the axis of w that is cut.
    bias_is_cut: whether a rank holds only its own columns of y, and so of the bias.
    tokens_are_cut: whether a rank holds only its own tokens of x or y. Such a cut reads
    sizes.tokens.
    """

    shard_axis: int
    bias_is_cut: bool
    tokens_are_cut: bool


class Choice(NamedTuple):
    """A router's choice for N tokens: ids (N, K) of experts, and probs (N, K)."""

    ids: Array
    probs: Array


class Plan(Protocol):
    """How a Dispatch moves the rows of a microbatch. counts: rows of each expert of this rank."""

    @property
    def counts(self) -> list[int]: ...


class Dispatch(Protocol):
    """How N tokens of each rank reach their experts on the ranks of a group; see experts.py.

    R: the number of rows that this rank gets.
    """

    def plan(self, ops: Ops, choice: Choice, experts: int, comm: Comm, name: str, /) -> Any:
        """Return the Plan of a choice among this many experts."""

    def rows(self, ops: Ops, x: Array, plan: Any, comm: Comm, name: str, /) -> Array:
        """Return (R, D): rows of x (N, D), sorted by expert."""

    def factors(self, ops: Ops, plan: Any, comm: Comm, name: str, /) -> Array:
        """Return (R,): the router's probability of each of these rows."""

    def combine(
        self, ops: Ops, rows: Array, plan: Any, weighted: bool, comm: Comm, name: str, /
    ) -> Array:
        """Return (N, D): the sum of the rows of each token, weighted by its probabilities."""

    def factors_back(self, ops: Ops, factors: Array, plan: Any, comm: Comm, name: str, /) -> Array:
        """Return (N, K): the rows' factors (R,), back at the choices that they belong to."""


class Attending(NamedTuple):
    """What attention works with on this rank.

    ops: all array functions. comm: the ranks of cp. name: of the barriers. batch: has the positions
    in the row of the tokens that this rank holds, and those of all ranks' tokens if these are more.
    """

    ops: Ops
    comm: Comm
    name: str
    batch: Batch


class ContextCut(Protocol):
    """Causal attention of the tokens that a rank holds, over the ranks of cp; see context.py."""

    def forward(self, here: Attending, q: Array, k: Array, v: Array, /) -> tuple[Array, Saved]:
        """Return y (B, n, H, d), and what the backward pass needs."""

    def backward_input(self, here: Attending, dy: Array, saved: Saved, out: Out, /) -> None:
        """Write dq, dk and dv to the three arrays of `out`."""
