"""The cost of each layer per rank and microbatch, in letters: products, bytes kept, barriers.

A Sum is a sum of products of letters with their coefficients: {("B", "T", "D", "e"): 4} is
4*B*T*D*e. Each letter stands for a size on a rank, see LETTERS. One form thus serves as a text for
readers and as a number for each layout. A lower-case letter is a rank's piece: f of F, d of D, v of
V, and t of T where tokens are cut between products.

A layer knows nothing of this. COSTS says by its class what it costs, and a test compares that with
what the layer itself does in the step on shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mpipar.comm.grid import chunk_size
from mpipar.comm.record import wire_bytes
from mpipar.config.model import ModelConfig
from mpipar.layers.attention import Attention
from mpipar.layers.embedding import EMBEDDINGS, Embedding, TokenEmbedding
from mpipar.layers.ffn import FFNS, FeedForward, GatedFeedForward
from mpipar.layers.linears import FFN_CUTS
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.moe import MixtureOfExperts
from mpipar.layers.norm import NORMS, LayerNorm, RMSNorm

LETTERS = """\
B rows of a microbatch, T tokens of each on a rank, A tokens of a whole row, D model width, F ffn
width, V vocabulary, f and v a rank's pieces of F and V, t its tokens between products where they
are cut, Q and K widths of a rank's queries and keys, h its heads of queries, E experts, x those of
a rank, k experts that a token passes, g a rank's piece of the width in an expert, W and w those of
the shared expert, e bytes of a number, s bytes of one in a sum"""
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
    one operation, as a multiple of what the Barrier carries. factor: the same multiple in formulas.
    sent: how often a rank sends what the Barrier carries, as a number and a formula of q.
    """

    operations: tuple[str, ...]
    rounds: Callable[[int], int]
    pieces: Callable[[int], float]
    factor: str
    sent: tuple[int, str]


def once(_q: int) -> int:
    """Return 1, for a group of any size."""
    return 1


def all_of(q: int) -> int:
    """Return the number of ranks in the group."""
    return q


KINDS = {
    "all_reduce": Kind(("all_reduce",), once, once, "", (2, "(q-1)/q")),
    "all_gather": Kind(("all_gather",), once, all_of, "q * ", (1, "(q-1)")),
    "reduce_scatter": Kind(("reduce_scatter",), once, all_of, "q * ", (1, "(q-1)")),
    "all_to_all": Kind(("all_to_all",), once, once, "", (1, "(q-1)/q")),
    "all_to_allv": Kind(  # for equal parts
        ("all_to_allv",), once, lambda q: (q - 1) / q, "(q-1)/q * ", (1, "(q-1)/q")
    ),
    "ring": Kind(("send", "recv"), lambda q: q - 1, once, "", (1, "(q-1)")),
    # The last message brings a sum home.
    "ring_home": Kind(("send", "recv"), all_of, once, "", (1, "q")),
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

    weights: numbers in the weights. flops: FLOPs of a forward pass. attention: those of attention
    among them. stash: bytes kept from F to I. kept: from I to W. barriers: in the order of the
    layers.
    """

    weights: Sum = NOTHING
    flops: Sum = NOTHING
    attention: Sum = NOTHING
    stash: Sum = NOTHING
    kept: Sum = NOTHING
    barriers: tuple[Barrier, ...] = ()


def together(*costs: Cost) -> Cost:
    """Return the Cost of several layers."""
    return Cost(
        total(one.weights for one in costs),
        total(one.flops for one in costs),
        total(one.attention for one in costs),
        total(one.stash for one in costs),
        total(one.kept for one in costs),
        tuple(barrier for one in costs for barrier in one.barriers),
    )


class Cut(NamedTuple):
    """What a cut of a product sends.

    side: the side of the matrix that it cuts, x or y. tokens: whether it cuts the tokens of the
    other side as well. barriers: (phase, kind, side whose activations it carries) of each.
    """

    side: str
    tokens: bool
    barriers: tuple[tuple[str, str, str], ...]


# By the name in LINEARS.
CUT_COSTS = {
    "column": Cut("y", False, (("I", "all_reduce", "x"),)),
    "row": Cut("x", False, (("F", "all_reduce", "y"),)),
    "gather": Cut("y", False, (("F", "all_gather", "y"), ("I", "all_reduce", "x"))),
    "reduce": Cut("x", False, (("F", "all_reduce", "y"), ("I", "all_gather", "x"))),
    "column_sp": Cut(
        "y",
        True,
        (("F", "all_gather", "x"), ("I", "reduce_scatter", "x"), ("W", "all_gather", "x")),
    ),
    "row_sp": Cut("x", True, (("F", "reduce_scatter", "y"), ("I", "all_gather", "y"))),
    "column_ring": Cut("y", True, (("F", "ring", "x"), ("I", "ring", "x"), ("W", "ring", "x"))),
    "row_ring": Cut("x", True, (("F", "ring", "y"), ("I", "ring", "y"))),
}
# Attention over cp: (phase, kind, widths, e or s) of each barrier; it carries B*T*widths numbers.
CONTEXT: dict[str | None, tuple[tuple[str, str, str, str], ...]] = {
    None: (),
    "ring": (("F", "ring", "KK", "e"), ("I", "ring", "KK", "e"), ("I", "ring_home", "KK", "s")),
    "gather": (
        ("F", "all_gather", "KK", "e"),
        ("I", "all_gather", "KK", "e"),
        ("I", "reduce_scatter", "KK", "s"),
    ),
    "ulysses": (
        ("F", "all_to_all", "QKK", "e"),
        ("F", "all_to_all", "Q", "e"),
        ("I", "all_to_all", "Q", "e"),
        ("I", "all_to_all", "QKK", "e"),
    ),
}
# The exchange of rows with experts: (phase, end of the name, kind, bytes) of each barrier.
DISPATCH = (
    ("F", "counts", "all_to_all", "E*s"),
    ("F", "dispatch", "all_to_allv", "B*T*k*D*e"),
    ("F", "combine", "all_to_allv", "B*T*k*D*e"),
    ("I", "dispatch", "all_to_allv", "B*T*k*D*e"),
    ("I", "probs", "all_to_allv", "B*T*k*s"),
    ("I", "probs", "all_to_allv", "B*T*k*s"),
    ("I", "combine", "all_to_allv", "B*T*k*D*e"),
)


class Case(NamedTuple):
    """What decides the cost of a layer.

    method: of attention over cp, None where every rank holds all tokens. scores: whether attention
    keeps all scores.
    """

    config: ModelConfig
    method: str | None = None
    scores: bool = False

    @property
    def rows(self) -> str:
        """The letters of the tokens that a rank holds between products."""
        return "B*t" if self.config.sequence_parallel else "B*T"

    @property
    def pair(self) -> tuple[str, str]:
        """The cuts of two products, the second of which reads the first one's result."""
        if not self.config.sequence_parallel:
            return "column", "row"
        return {"plain": ("column_sp", "row_sp"), "ring": ("column_ring", "row_ring")}[
            self.config.tp_matmul
        ]

    def tokens(self, name: str, scatter: str, gather: str) -> tuple[Barrier, ...]:
        """Return the barriers of a layer that gathers held tokens in one phase and scatters them in
        another.
        """
        cut = self.config.sequence_parallel
        kinds = (
            {scatter: "reduce_scatter", gather: "all_gather"} if cut else {scatter: "all_reduce"}
        )
        return tuple(
            Barrier(name, phase, kind, array(self.rows, "D"))
            for phase, kind in sorted(kinds.items())
        )


def sides(cut: str, inner: str, outer: str) -> dict[str, tuple[str, str]]:
    """Return {x or y: (letters of a rank's matrix on this side, letters of its array there)}.

    A cut that gathers one side by width leaves the whole array on every rank.
    """
    one, whole = CUT_COSTS[cut], {"x": inner, "y": outer}
    own = whole | {one.side: whole[one.side].translate(PIECES)}
    gathered = {side for _, kind, side in one.barriers if kind == "all_gather" and not one.tokens}
    return {side: (own[side], (whole if side in gathered else own)[side]) for side in "xy"}


def product(name: str, cut: str, inner: str, outer: str, *, again: bool = True) -> Cost:
    """Return the Cost of a product and its cut. inner, outer: letters of its whole widths.

    again: see Barrier.
    """
    one, widths = CUT_COSTS[cut], sides(cut, inner, outer)
    held = "B*t" if one.tokens else "B*T"
    # A cut that gathers x again for the weight gradient keeps only its own tokens of x.
    pieces = any(phase == "W" for phase, *_ in one.barriers)
    x, y = array(held if pieces else "B*T", widths["x"][1]), array("B*T", widths["y"][1])
    pairs = [f"{one}*{other}" for one in widths["x"][0] for other in widths["y"][0]]
    return Cost(
        total(map(term, pairs)),
        total(term(f"B*T*{pair}", 2) for pair in pairs),
        stash=x,
        kept=total((x, y)),
        barriers=tuple(
            Barrier(name, phase, kind, array(held, widths[side][0]), again=again and phase == "F")
            for phase, kind, side in one.barriers
        ),
    )


def embedding(case: Case, name: str) -> Cost:
    """Return the Cost of a token embedding."""
    barriers = case.tokens(name, scatter="F", gather="W")
    return Cost(kept=array(case.rows, "D"), barriers=barriers)


def norm(case: Case, statistics: int) -> Cost:
    """Return the Cost of a norm that keeps this many statistics per token."""
    x, kept = array(case.rows, "D"), term(f"{case.rows}*s", statistics)
    return Cost(stash=total((x, kept)), kept=total((x, x, kept)))


def attention(case: Case, name: str) -> Cost:
    """Return the Cost of attention.

    Without scores it keeps two numbers for each query and, where heads were exchanged, the result
    for all tokens of some heads besides its own.
    """
    kept = [array("B*T", "QKK")]
    if case.scores:
        kept.append(array("B*T*A", "h"))
    else:
        kept.append(array("B*T", "hh", "s"))
        kept.append(array("B*T", "Q" if case.method == "ulysses" else ""))
    flops = term("B*T*A*Q", 4)
    inside = Cost(
        flops=flops,
        attention=flops,
        stash=total(kept),
        barriers=tuple(
            Barrier(name, phase, kind, array("B*T", widths, number), "cp", phase == "F")
            for phase, kind, widths, number in CONTEXT[case.method]
        ),
    )
    shared = Barrier(f"{name}.kv", "W", "all_reduce", array("B*T", "KK"), "kv")
    return together(
        product(f"{name}.qkv", case.pair[0], "D", "QKK"),
        inside,
        Cost(barriers=(shared,)),
        product(f"{name}.proj", case.pair[1], "Q", "D"),
    )


def feed_forward(case: Case, name: str, width: str, *, gated: bool) -> Cost:
    """Return the Cost of a feed-forward network. width: the letter of its own width."""
    cut, wide = case.config.ffn_cut, width * (1 + gated)
    up_cut, down_cut = case.pair if cut == "pair" else FFN_CUTS[cut]
    up = product(f"{name}.up", up_cut, "D", wide)
    down = product(f"{name}.down", down_cut, width, "D", again=False)
    if gated:
        down = down._replace(stash=NOTHING)
    return together(up, Cost(stash=array("B*T", sides(up_cut, "D", wide)["y"][1])), down)


def experts(case: Case, name: str) -> Cost:
    """Return the Cost of a mixture of experts that are equally popular."""
    wide, rows = "gg" if case.config.activation == "swiglu" else "g", "B*T*k"
    up = case.tokens(f"{name}.up", scatter="I", gather="F")
    exchange = [
        Barrier(
            f"{name}.{ending}",
            phase,
            kind,
            term(carries),
            "expert",
            phase == "F" and ending != "combine",
        )  # see `MixtureOfExperts.recompute`
        for phase, ending, kind, carries in DISPATCH
    ]
    loads = Barrier(f"{name}.router.loads", "I", "all_reduce", term("B*E*s"), "cp")
    h, x, matrices = array(rows, wide), array(rows, "D"), f"{wide}g"
    return Cost(
        total((term("E*D"), *(term(f"x*D*{one}") for one in matrices))),
        total((term("B*T*D*E", 2), *(term(f"{rows}*D*{one}", 2) for one in matrices))),
        stash=total((array("B*T", "D"), term("B*T*E*s"), term(f"{rows}*s"), x, h)),
        kept=total((array("B*T", "D"), term("B*T*E*s"), x, x, h, array(rows, "g"))),
        barriers=(
            *(one._replace(again=one.phase == "F") for one in up),
            *exchange,
            *case.tokens(f"{name}.down", scatter="F", gather="I"),
            *[loads] * (case.config.router_balance == "loss"),
        ),
    )


def head(case: Case) -> Cost:
    """Return the Cost of the LM head."""
    barriers = case.tokens("head", scatter="I", gather="F")
    return product("head", "column", "D", "V")._replace(barriers=barriers)


def cross_entropy() -> Cost:
    """Return the Cost of the loss, which keeps the logits and two numbers of each token."""
    return Cost(
        stash=total((array("B*T", "v"), term("B*T*s", 2))),
        barriers=(Barrier("loss", "F", "all_gather", term("B*T*s", 3)),),
    )


# By class: (case, name of the layer, letter of its own width) -> Cost.
COSTS: dict[object, Callable[[Case, str, str], Cost]] = {
    TokenEmbedding: lambda case, name, _: embedding(case, name),
    Embedding: lambda case, name, _: embedding(case, name),
    LayerNorm: lambda case, *_: norm(case, 2),
    RMSNorm: lambda case, *_: norm(case, 1),
    Attention: lambda case, name, _: attention(case, name),
    FeedForward: lambda *one: feed_forward(*one, gated=False),
    GatedFeedForward: lambda *one: feed_forward(*one, gated=True),
    MixtureOfExperts: lambda case, name, _: experts(case, name),
    Head: lambda case, *_: head(case),
    CrossEntropy: lambda *_: cross_entropy(),
}


class UnitCosts(NamedTuple):
    """What the units of a model cost: layers before the blocks, each block, final norm and head.

    stream: bytes of the activations between two units, which are also a message between stages.
    """

    entry: Cost
    blocks: tuple[Cost, ...]
    head: Cost
    stream: Sum

    @property
    def kinds(self) -> list[Cost]:
        """The distinct Costs of blocks, in the order of the blocks."""
        return list({id(one): one for one in self.blocks}.values())

    @property
    def block(self) -> Cost:
        """The Cost of every block, for a model with a single kind of block."""
        (one,) = self.kinds
        return one


def unit_costs(case: Case) -> UnitCosts:
    """Return what the units of a model cost."""
    config = case.config

    def of(layer: object, name: str = "", width: str = "F") -> Cost:
        return COSTS[layer](case, name, width)

    around = NORMS[config.norm]
    attend = [of(around), of(Attention, "block*.attn"), of(around)]
    ffn = FFNS[config.activation]
    shared = [of(ffn, "block*.shared", "W")] * bool(config.shared_expert_ffn)
    kinds = {
        "dense": together(*attend, of(ffn, "block*.ffn")),
        "experts": together(*attend, *shared, of(MixtureOfExperts, "block*.moe")),
    }
    return UnitCosts(
        of(EMBEDDINGS[config.positions], "embedding"),
        tuple(kinds[config.block_kind(index)] for index in range(config.layers)),
        together(of(around), of(Head), of(CrossEntropy)),
        array(case.rows, "D"),
    )


def letters(
    config: ModelConfig, rows: int, tp: int, cp: int, table_multiple: int = 1
) -> dict[str, float]:
    """Return the sizes of LETTERS for a microbatch of `rows` rows on a rank, except e and s.

    table_multiple: see `Ops`; by default there are no padding rows, as in the FLOPs of the model
    itself.
    """
    assert config.ffn, "completed"
    assert config.head_dim, "completed"
    assert config.kv_heads, "completed"
    tokens, heads = config.seq_len // cp, config.heads // tp
    return {
        "B": rows,
        "T": tokens,
        "t": chunk_size(tokens, tp),
        "A": config.seq_len,
        "D": config.d_model,
        "F": config.ffn,
        "V": config.vocab_size,
        "d": chunk_size(config.d_model, tp),
        "f": chunk_size(config.ffn, tp),
        "v": chunk_size(config.vocab_size, tp, table_multiple),
        "Q": heads * config.head_dim,
        "K": chunk_size(config.kv_heads, tp) * config.head_dim,
        "h": heads,
        "E": config.experts or 0,
        "x": config.experts or 0,
        "k": config.experts_per_token,
        "g": chunk_size(config.expert_ffn or 0, tp),
        "W": config.shared_expert_ffn or 0,
        "w": chunk_size(config.shared_expert_ffn or 0, tp),
    }
