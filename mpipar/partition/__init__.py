"""The upper tile level: one product `y = x @ w` cut over the ranks of a group, one file per cut.

Every cut has the same three functions. The barriers of products are visible lines in these files:

    forward(ops, x, w, comm, name)                    -> y
    backward_input(ops, dy, w, comm, name)            -> dx
    backward_weight(ops, x, dy, dw, comm, name)       dw += x^T dy

w (K, N) is this rank's shard; `shard_axis` says which of its two axes is cut (None: not at all).
"""

from mpipar.partition import column, gather, row

CUTS = {"column": column, "row": row, "gather": gather}
