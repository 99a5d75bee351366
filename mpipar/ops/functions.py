"""The table of array functions: the arguments and results of each, with their shapes and types.

Three readers share it. `numpy_tiles` walks the functions of rows over blocks that stay in cache.
`shape_ops` makes results of the right shape. `mixed_ops` rounds activations to 16 bits. A new
function is a formula in `array_ops` and a line here.

A line reads "arguments -> results". `x[..K]` is an array: `..` stands for all leading dimensions
and each letter for one. A letter has one size throughout a line; a digit is a size. `eps` is not an
array, `shape=BHWC` is a tuple of sizes, and `count=K` is one size. Marks of an argument: the
function writes to it (`+`), or it may be missing (`?`).

A result that bears an argument's name is that argument. Any other result is an activation, of the
type of the first argument with real numbers. A mark says otherwise: `:sum` the type of sums,
`:float64`, `:int64`, `:host` a Python number.
"""

import re
from math import prod
from typing import NamedTuple

# Functions of rows: any rows of the results need only the same rows of the arguments.
ROWS = {
    "gelu_forward": "x[..] -> y[..]",
    "gelu_backward_input": "dy[..] x[..] -> dx[..]",
    "swiglu_forward": "h[..2F] -> y[..F]",
    "swiglu_backward_input": "dy[..F] h[..2F] -> dh[..2F] y[..F]",
    "rmsnorm_forward": "x[..D] w[D] eps -> y[..D] rstd[..]:sum",
    "rmsnorm_backward_input": "dy[..D] x[..D] w[D] rstd[..] -> dx[..D]",
    "rmsnorm_backward_weight": "dy[..D] x[..D] rstd[..] dw[D]+ ->",
    "layernorm_forward": "x[..D] w[D] b[D] eps -> y[..D] mean[..]:sum rstd[..]:sum",
    "layernorm_backward_input": "dy[..D] x[..D] w[D] mean[..] rstd[..] -> dx[..D]",
    "layernorm_backward_weight": "dy[..D] x[..D] mean[..] rstd[..] dw[D]+ db[D]+ ->",
    "cross_entropy_forward": "logits[..V] targets[..] start num_valid -> stats[..3]:sum",
    "cross_entropy_backward_input":
        "logits[..V]+ targets[..] lse[..] start num_valid scale -> logits",
    "top_forward": "logits[..V] start num_valid count=K -> best[..K2]:float64",
    "sgd_step": "data[..]+ grad[..] lr ->",
    "adamw_step": "data[..]+ grad[..] m[..]+ v[..]+ lr beta1 beta2 eps weight_decay step "
                  "copy[..]+? ->",
}
# Functions of whole arrays.
WHOLE = {
    "fill": "x[..]+ value ->",
    "copy": "dst[..]+ src[..] ->",
    "scale": "x[..]+ factor -> x",
    "accumulate": "x[..]+ y[..] -> x",
    "add_parts": "parts[P..] -> sum[..]",
    "sum": "x[..] -> total:host",
    "square_sum": "x[..] -> total:host",
    "checksum": "x[..] -> total:host",
    "matmul": "x[..K] w[KM] -> y[..M]",
    "matmul_nt": "x[..M] w[KM] -> y[..K]",
    "matmul_tn_add": "x[..K] y[..M] out[KM]+ ->",
    "bias_forward": "y[..M]+ b[M] -> y",
    "bias_backward_weight": "dy[..M] db[M]+ ->",
    "bias_gelu_forward": "x[..M]+ b[M] -> y[..M]",
    "embedding_forward": "ids[..] table[VD] start -> y[..D]",
    "embedding_backward_weight": "ids[..] dy[..D] dtable[VD]+ start ->",
    # Q queries, K keys, H heads, G heads of keys and values. What is saved may be a pair instead.
    "attention_forward": "q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd] saved[BHQK]",
    "attention_backward_input": "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] saved q_pos[Q] k_pos[K] out? -> "
                                "dq[BQHd] dk[BKGd] dv[BKGd]",
    "attention_block_forward": "q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> "
                               "y[BQHd]:sum lse[BHQ]:sum",
    "attention_merge": "y[BQHd]+ lse[BHQ]+ y2[BQHd] lse2[BHQ] ->",
    "attention_delta": "dy[BQHd] y[BQHd] -> delta[BHQ]:sum",
    "attention_block_backward": "dy[BQHd] q[BQHd] k[BKGd] v[BKGd] lse[BHQ] delta[BHQ] q_pos[Q] "
                                "k_pos[K] -> dq[BQHd]:sum dk[BKGd]:sum dv[BKGd]:sum",
    # h is d/2, P positions; those of the tokens are (T,) or (B, T).
    "rope_forward": "x[BTHd]+ positions table[P2h] -> x",
    "rope_backward_input": "dy[BTHd]+ positions table[P2h] -> dy",
    "position_forward": "x[BTD] positions[T] table[PD] -> y[BTD]",
    "position_backward_weight": "positions[T] dy[BTD] dtable[PD]+ ->",
    "cross_entropy_combine": "stats[SN3] -> loss[N]:sum lse[N]:sum",
    "unfold_forward": "x[BHWC] kernel stride padding -> y[BPQK]",
    "unfold_backward_input": "dy[BPQK] shape=BHWC kernel stride padding -> dx[BHWC]",
    "adamw_runs": "data[..]+ grad[..] m[..]+ v[..]+ runs lr beta1 beta2 eps weight_decay step "
                  "copy[..]+? ->",
    "maxpool_forward": "x[BHWC] width -> y[BPQC] places[BPQC]:int64",
    "maxpool_backward_input": "dy[BPQC] places[BPQC] shape=BHWC width -> dx[BHWC]",
    "meanpool_forward": "x[BHWC] -> y[BC]",
    "meanpool_backward_input": "dy[BC] shape=BHWC -> dx[BHWC]",
}
# FLOPs: a number and the sizes that it is multiplied by.
FLOPS = {"matmul": "2..KM", "matmul_nt": "2..KM", "matmul_tn_add": "2..KM"}
# These take 16 bits as they are. They move values, add two numbers of one type (which rounds once),
# or work on arrays that are float32 anyway.
EXACT_IN_16_BITS = (
    "fill", "copy", "scale", "accumulate", "bias_forward", "embedding_forward", "sum",
    "square_sum", "checksum", "attention_merge", "cross_entropy_combine", "sgd_step", "adamw_step",
    "adamw_runs",
)
# Functions that make arrays and take them from the device to the host.
MEMORY = ("empty", "zeros", "asarray", "to_host", "pinned", "to_pinned", "synchronize")


DIMS = re.compile(r"\.\.|\w")
PART = re.compile(r"(\w+)(?:\[([\w.]*)\])?(\+?)(\??)(?:=(\w+))?(?::(\w+))?")


class Part(NamedTuple):
    """An argument or a result. dims: ("..", "K"), or None if it is not an array. kind: the mark
    behind.
    """

    name: str
    dims: tuple[str, ...] | None
    written: bool
    optional: bool
    sizes: str
    kind: str

    @classmethod
    def parse(cls, text):
        """Return the Part that a word of the table describes."""
        name, dims, written, optional, sizes, kind = PART.fullmatch(text).groups()
        dims = None if dims is None else tuple(DIMS.findall(dims))
        return cls(name, dims, bool(written), bool(optional), sizes or "", kind or "")

    @property
    def by_row(self):
        """Whether its leading dimensions are the rows of a function of rows."""
        return self.dims is not None and self.dims[:1] == ("..",)

    def lengths(self, shape):
        """Return the size of each of `dims`, for `..` a tuple; None if shape has other dims."""
        extra = len(shape) - len(self.dims)
        if ".." not in self.dims:
            return shape if extra == 0 else None
        at, extra = self.dims.index(".."), extra + 1
        if extra < 0:
            return None
        return (*shape[:at], tuple(shape[at : at + extra]), *shape[at + extra :])


class Function(NamedTuple):
    """A line of the table."""

    name: str
    text: str
    takes: tuple[Part, ...]
    gives: tuple[Part, ...]

    @classmethod
    def parse(cls, name, text):
        """Return the Function that a line describes."""
        takes, gives = (tuple(map(Part.parse, side.split())) for side in text.split("->"))
        return cls(name, text, takes, gives)

    @property
    def makes(self):
        """The results that are new, and not arguments."""
        names = {part.name for part in self.takes}
        return tuple(part for part in self.gives if part.name not in names)

    def bind(self, arguments, named):
        """Return name -> argument of a call."""
        names = [part.name for part in self.takes]
        given = dict(zip(names, arguments, strict=False)) | named
        missing = [part.name for part in self.takes if not (part.optional or part.name in given)]
        if missing or len(arguments) + len(named) != len(given) or not given.keys() <= set(names):
            raise TypeError(f"{self.name} takes {self.text}: {len(arguments)} arguments and "
                            f"{list(named)} were given")
        return given

    def arrays(self, given):
        """Return [(Part, array)] of the arguments of a call that are arrays."""
        return [(part, given[part.name]) for part in self.takes
                if part.dims is not None and given.get(part.name) is not None]

    def sizes(self, given):
        """Return letter -> size of the arguments of a call, which must fit together."""
        sizes, fits = {}, True
        arrays = self.arrays(given)
        pairs = [(part.dims, part.lengths(x.shape)) for part, x in arrays]
        pairs += [(part.sizes, given[part.name] if len(part.sizes) > 1 else (given[part.name],))
                  for part in self.takes if part.sizes]
        for letters, lengths in pairs:
            fits &= lengths is not None and all(
                length == (int(letter) if letter.isdigit() else sizes.setdefault(letter, length))
                for letter, length in zip(letters, lengths, strict=True))
        shapes = ", ".join(str(tuple(x.shape)) for _, x in arrays)
        assert fits, f"{self.name}: shapes {shapes} do not fit {self.text}"
        return sizes


def shape_of(dims, sizes):
    """Return the shape that letters stand for."""
    shape = ()
    for letter in dims:
        length = int(letter) if letter.isdigit() else sizes[letter]
        shape += length if isinstance(length, tuple) else (length,)
    return shape


def flops(name, sizes):
    """Return the floating-point operations of a call of a product, 0 of other functions."""
    return prod(shape_of(DIMS.findall(FLOPS[name]), sizes)) if name in FLOPS else 0


FUNCTIONS = {name: Function.parse(name, text) for name, text in {**ROWS, **WHOLE}.items()}
