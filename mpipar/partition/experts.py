"""Expert parallelism: how rows of tokens reach the ranks that hold their experts, and come back.

A block's experts are distributed over the ranks of the group `expert`: rank i of q holds the i-th
E/q of them. Each rank has N tokens of its own, and a router has assigned K experts to each token.
There are two ways, each in its own file: rows are sent to the ranks of their experts
(experts_all_to_all.py), or every rank gets all rows and takes those of its own experts
(experts_gather.py). contracts.py declares their functions.

Rows are in the order of this rank's experts, and the rows of one expert in the order of ranks and
tokens, so every run yields the same bits. The number of rows of an expert is not limited, so no
token is dropped.
"""

from __future__ import annotations

from mpipar.partition import experts_all_to_all, experts_gather
from mpipar.partition.contracts import Dispatch

# --expert-dispatch
DISPATCHES: dict[str, Dispatch] = {"all-to-all": experts_all_to_all, "all-gather": experts_gather}
