"""Expert parallelism: how rows of tokens reach the ranks that hold their experts, and come back.

The ranks of the group `expert` share out the experts of a block: rank i of q holds the i-th E/q of
them. Each has N tokens of its own, and a router has given each token K experts. There are two ways,
a file each. Rows are sent to the ranks of their experts (experts_all_to_all.py). Or every rank gets
all rows and takes those of its own experts (experts_gather.py). contracts.py says what they are.

Rows lie in the order of this rank's experts, and those of an expert in the order of ranks and
tokens. So every run has the same bits. Nothing bounds the rows of an expert, so no token is
dropped.
"""

from __future__ import annotations

from mpipar.partition import experts_all_to_all, experts_gather
from mpipar.partition.contracts import Dispatch

# --expert-dispatch
DISPATCHES: dict[str, Dispatch] = {
    "all-to-all": experts_all_to_all, "all-gather": experts_gather}
