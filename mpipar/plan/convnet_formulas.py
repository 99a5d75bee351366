"""What each barrier of a convnet's step must carry, as formulas: text for readers, numbers for
tests.

Letters: B images of a microbatch, D channels of the stream, F channels inside a pair. q is the size
of the group, e the bytes of a number. S0 and S are the places (height times width) of an image
before and after the stem's pooling. In a gather, D and F include the padding to equal pieces. A
pair of convolutions is a pair of products. So it has one all-reduce forward and one backward,
whatever the kernel.
"""

from __future__ import annotations

import math

from mpipar.comm.grid import share
from mpipar.comm.record import family
from mpipar.data.rows import rows_per_microbatch
from mpipar.models.convnet import stem_size, stream_size

LETTERS = """\
B images of a microbatch, D channels of the stream, F channels inside a pair, S0 and S places of an
image before and after the stem, e bytes of a number, s bytes of one in a sum"""
CARRIED = {  # (name, operation): letters of the payload, besides B*e; for up and down see `letters`
    ("stem", "all_gather"): ("S0", "D"), ("head", "all_reduce"): ("D",),
    ("activations", "send"): ("S", "D"), ("activations", "recv"): ("S", "D"),
    ("gradients", "send"): ("S", "D"), ("gradients", "recv"): ("S", "D"),
}
# Convolutions that stand alone carry F channels in one pass each: the one to F in forward, the one
# from F in backward. The operation says which pass it is.
FORWARD = {"gather": "all_gather", "reduce": "all_reduce"}


def letters(name: str, operation: str, ffn_cut: str) -> tuple[str, ...] | None:
    """Letters of an operation's payload; None if it is not an activation."""
    name = family(name).removeprefix("block*.")
    if name in ("up", "down"):
        forward = operation == FORWARD.get(ffn_cut)
        wide = ffn_cut != "pair" and (name == "up") == forward
        return ("S", "F") if wide else ("S", "D")
    return CARRIED.get((name, operation))


def payload(name: str, operation: str, config, itemsize: int, group_size: int,
            ) -> tuple[str, int] | None:
    """(formula, bytes) of an operation's payload, None where there is no formula."""
    num_rows = rows_per_microbatch(config)
    if name == "loss" and operation == "all_gather":
        return "q * 3*B*e", group_size * 3 * num_rows * itemsize
    found = letters(name, operation, config.model.ffn_cut)
    if found is None:
        return None
    sizes = {"S0": math.prod(stem_size(config.model)), "S": math.prod(stream_size(config.model)),
             "D": config.model.channels, "F": config.model.ffn}
    if operation == "all_gather":
        sizes |= {letter: share(sizes[letter], group_size) * group_size for letter in "DF"}
    return (f"B*{'*'.join(found)}*e",
            num_rows * itemsize * math.prod(sizes[letter] for letter in found))


def layer(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over tp: both passes of a block and microbatch."""
    model = config.model
    once = ((group_size - 1) / group_size * rows_per_microbatch(config)
            * math.prod(stream_size(model)) * itemsize)
    if model.ffn_cut == "pair":
        return 2, "4(q-1)/q * B*S*D*e", 4 * once * model.channels
    widths = model.channels, model.ffn
    gathered = sum(share(width, group_size) * group_size for width in widths)
    return 4, "3(q-1)/q * B*S*(D + F)*e", once * (2 * sum(widths) + gathered)


def again(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over tp of a block that runs forward again.

    The last product of a block is left out, and so is its barrier.
    """
    model = config.model
    once = ((group_size - 1) / group_size * rows_per_microbatch(config)
            * math.prod(stream_size(model)) * itemsize)
    if model.ffn_cut == "pair":
        return 0, "0", 0
    if model.ffn_cut == "reduce":
        return 1, "2(q-1)/q * B*S*F*e", 2 * once * model.ffn
    return 1, "(q-1)/q * B*S*F*e", once * share(model.ffn, group_size) * group_size


def ends(config, first: int, last: int, itemsize: int, sum_itemsize: int, group_size: int):
    """[(calls, formula, bytes that a rank sends)] over tp outside the blocks, for a microbatch.

    The stem gathers if `first`. The head sums and the loss gathers if `last`.
    """
    num_rows, channels, found = rows_per_microbatch(config), config.model.channels, []
    if first:
        gathered = share(channels, group_size) * (group_size - 1)
        found.append((1, "(q-1)/q * B*S0*D*e",
                      num_rows * math.prod(stem_size(config.model)) * gathered * itemsize))
    if last:
        found.append((1, "2(q-1)/q * B*D*e",
                      2 * (group_size - 1) / group_size * num_rows * channels * itemsize))
        found.append((1, "(q-1) * 3*B*e", (group_size - 1) * 3 * num_rows * sum_itemsize))
    return found


def replicated(config, blocks: int, last: int) -> int:
    """Always 0: every rank of tp has all places, so no gradient of a replica is partial."""
    return 0
