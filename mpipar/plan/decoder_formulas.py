"""What each barrier of a decoder's step must carry, as formulas: text for readers, numbers for
tests.

Letters: B rows of a microbatch, T tokens that a rank of cp holds of each, D model width, F ffn
width. Q is the width of all heads of queries of a rank of tp, H d / tp. K is that of its heads of
keys, Hkv d / tp, at least d. q is the size of the group, e the bytes of a number, s those of a
number in a sum. In a gather or scatter, letters include the padding to equal pieces. A column/row
pair has two all-reduces per layer and pass (arXiv 1909.08053, 2104.04473).
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.comm.grid import share
from mpipar.comm.record import family
from mpipar.data.rows import rows_per_microbatch

LETTERS = """\
B rows of a microbatch, T tokens of each on a rank, D model width, F ffn width, Q and K widths of a
rank's queries and keys, h its heads of queries, e bytes of a number, s bytes of one in a sum"""
OF_THE_STREAM = {  # barriers and messages that carry D numbers for each token
    "embedding", "attn.qkv", "attn.proj", "ffn.up", "ffn.down", "head", "activations", "gradients"}


class Sizes(NamedTuple):
    """The letters of the formulas for a resolved config."""

    B: int
    T: int
    D: int
    F: int
    Q: int
    K: int
    e: int


def sizes(config, itemsize: int) -> Sizes:
    """B, T, D, F, Q, K, e of a resolved config."""
    model, rows, tp = config.model, rows_per_microbatch(config), config.grid.tp
    tokens = model.seq_len // config.grid.cp
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    return Sizes(rows, tokens, model.d_model, model.ffn, heads * model.head_dim,
                 kv_heads * model.head_dim, itemsize)


def width(name: str, operation: str, ffn_cut: str) -> str | None:
    """Width of an operation's payload per token: D, F, or None if it is not an activation."""
    name = family(name).removeprefix("block*.")
    if name in ("ffn.up", "ffn.down") and ffn_cut != "pair":
        # Of products that stand alone, the first carries F forward, the second F backward.
        forward = operation == {"gather": "all_gather", "reduce": "all_reduce"}[ffn_cut]
        return "F" if (name == "ffn.up") == forward else "D"
    return "D" if name in OF_THE_STREAM else None


def payload(name: str, operation: str, config, itemsize: int, group_size: int,
            ) -> tuple[str, int] | None:
    """(formula, bytes) of an operation's payload, None where there is no formula.

    With sequence parallelism messages carry one tp rank's tokens, collectives those of all.
    """
    letters, tp = sizes(config, itemsize), config.grid.tp
    if name == "loss" and operation == "all_gather":
        return "q * 3*B*T*e", group_size * 3 * letters.B * letters.T * itemsize
    if family(name) == "block*.attn" and operation != "all_to_all":
        # A ring sends one rank's keys and values, or their gradients; the others carry all of them.
        count = "2" if operation in ("send", "recv") else "q * 2"
        together = 1 if operation in ("send", "recv") else group_size
        return (f"{count}*B*T*K*e",
                together * 2 * letters.B * letters.T * letters.K * itemsize)
    found = width(name, operation, config.model.ffn_cut)
    if found is None:
        return None
    formula, tokens, numbers = f"B*T*{found}*e", letters.T, getattr(letters, found)
    if config.model.sequence_parallel:
        tokens = share(letters.T, tp) * tp  # the last rank's tokens are padded
        if operation in ("send", "recv"):
            formula, tokens = f"{formula}/tp", tokens // tp
    elif operation == "all_gather":
        numbers = share(numbers, tp) * tp  # likewise
    return formula, letters.B * tokens * numbers * itemsize


def layer(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over tp: both passes of a block and microbatch.

    Source: arXiv 2104.04473 section 3.2. With sequence parallelism inputs are gathered once more,
    for the weight gradient. A ring sends and receives each of the q - 1 other pieces.
    """
    model, letters = config.model, sizes(config, itemsize)
    once = (group_size - 1) / group_size * letters.B * _tokens(config, group_size) * itemsize
    if model.sequence_parallel:
        calls = 20 * (group_size - 1) if model.tp_matmul == "ring" else 10
        return calls, "10(q-1)/q * B*T*D*e", 10 * once * letters.D
    if model.ffn_cut == "pair":
        return 4, "8(q-1)/q * B*T*D*e", 8 * once * letters.D
    gathered = sum(share(width, group_size) * group_size for width in (letters.D, letters.F))
    return 6, "(q-1)/q * B*T*(7D + 3F)*e", once * (6 * letters.D + 2 * letters.F + gathered)


def again(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over tp of a block that runs forward again.

    The last product of a block is left out, and so is its barrier.
    """
    model, letters = config.model, sizes(config, itemsize)
    once = (group_size - 1) / group_size * letters.B * _tokens(config, group_size) * itemsize
    if model.sequence_parallel:
        calls = 6 * (group_size - 1) if model.tp_matmul == "ring" else 3
        return calls, "3(q-1)/q * B*T*D*e", 3 * once * letters.D
    if model.ffn_cut == "pair":
        return 1, "2(q-1)/q * B*T*D*e", 2 * once * letters.D
    if model.ffn_cut == "reduce":
        return 2, "2(q-1)/q * B*T*(D + F)*e", 2 * once * (letters.D + letters.F)
    gathered = share(letters.F, group_size) * group_size
    return 2, "(q-1)/q * B*T*(2D + F)*e", once * (2 * letters.D + gathered)


def context_again(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over cp of a block that runs forward again."""
    letters, method, q = sizes(config, itemsize), config.grid.cp_attention, group_size
    tokens = letters.B * letters.T
    if method == "ulysses":
        return (2, "2(q-1)/q * B*T*(Q + K)*e",
                2 * (q - 1) / q * tokens * (letters.Q + letters.K) * itemsize)
    calls = 2 * (q - 1) if method == "ring" else 1
    return calls, "2(q-1) * B*T*K*e", 2 * (q - 1) * tokens * letters.K * itemsize


def context(config, itemsize: int, sum_itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over cp: both passes of a block and microbatch.

    Keys and values travel forward and once more backward, and so do their gradients, as sums. With
    ulysses q, k, v and y travel forward, and their gradients backward.
    """
    letters, method = sizes(config, itemsize), config.grid.cp_attention
    tokens, q = letters.B * letters.T * letters.K, group_size
    if method == "ulysses":
        both = letters.B * letters.T * (letters.Q + letters.K)
        return 4, "4(q-1)/q * B*T*(Q + K)*e", 4 * (q - 1) / q * both * itemsize
    calls, home = (4 * (q - 1) + 2 * q, 1) if method == "ring" else (3, 0)
    sums = "2q" if home else "2(q-1)"  # a ring's last message brings the sum home
    return (calls, f"4(q-1) * B*T*K*e + {sums} * B*T*K*s",
            4 * (q - 1) * tokens * itemsize + 2 * (q - 1 + home) * tokens * sum_itemsize)


def ends(config, first: int, last: int, itemsize: int, sum_itemsize: int, group_size: int):
    """[(calls, formula, bytes that a rank sends)] over tp outside the blocks, for a microbatch.

    The embedding counts if `first`, head and loss if `last`.
    """
    letters, cut = sizes(config, itemsize), config.model.sequence_parallel
    once = (group_size - 1) / group_size * letters.B * _tokens(config, group_size) * itemsize
    found = []
    if first or last:
        times = 2 * (first + last)  # an all-reduce, or a gather and a scatter
        calls = (1 + cut) * (first + last)
        found.append((calls, f"{times}(q-1)/q * B*T*D*e", times * once * letters.D))
    if last:
        statistics = 3 * letters.B * letters.T * sum_itemsize
        found.append((1, "(q-1) * 3*B*T*e", (group_size - 1) * statistics))
    return found


def replicated(config, blocks: int, last: int) -> int:
    """How many gradients of norms the ranks of tp sum once a step: each has those of its tokens."""
    if not config.model.sequence_parallel:
        return 0
    each = {"layer": 2, "rms": 1}[config.model.norm] * config.model.d_model
    return (2 * blocks + last) * each


def shared(config, blocks: int) -> int:
    """How many gradients of keys and values neighbours in tp sum once a step: all of one head."""
    model = config.model
    if config.grid.tp <= model.kv_heads:
        return 0
    bias = model.bias != "none"
    return blocks * 2 * model.head_dim * (model.d_model + bias)


def _tokens(config, group_size: int) -> int:
    """Tokens of a row, including the padding to equal pieces where they are cut."""
    tokens = config.model.seq_len // config.grid.cp
    return share(tokens, group_size) * group_size if config.model.sequence_parallel else tokens
