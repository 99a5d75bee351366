"""Recomputation: a block keeps only its input, and runs forward again before its input gradient.

This shortens what is kept from F to I. What the weight gradient needs lives from I to W as it does
without it. So schedules that put W off save less. The weights are those of the first time, because
no update comes between F and I. Source: Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from mpipar.layers.stash import Stash


class Recomputed:
    """A block that runs forward twice. The second time leaves out the result, which nobody reads.

    block: has `forward`, `backward_input`, `backward_weight`, `params`, and `recompute(x, stash)`,
    which fills the stash as forward does.
    """

    def __init__(self, context, block):
        self.block, self.params = block, block.params
        self.recorder = context.comms.recorder

    def forward(self, x, stash):
        """y of x. Comm: forward of the block."""
        stash[self, "x"] = x
        return self.block.forward(x, Stash(stash.batch))

    def backward_input(self, dy, stash):
        """dx of dy. Comm: recompute of the block, in a phase of its own, then backward_input."""
        inner = Stash(stash.batch)
        self.recorder.phase = "recompute"
        self.block.recompute(stash.pop((self, "x")), inner)
        self.recorder.phase = "I"
        stash[self, "inner"] = inner
        return self.block.backward_input(dy, inner)

    def backward_weight(self, stash):
        """Accumulate the gradients of the block. Comm: backward_weight of the block."""
        inner = stash.pop((self, "inner"))
        self.block.backward_weight(inner)
        assert not inner, f"the block left {list(inner)} in the stash"
