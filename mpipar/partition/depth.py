"""Cut over d grids of q x q ranks (2.5d, "depth"): less traffic for more memory.

The d grids share the rows of x and y. Each grid runs SUMMA on its rows with its own copy of w's
blocks. So x travels 1/d as far, and w as far as in one grid of q x q. The weight gradient is then
summed over the grids, which is one more barrier. Sources: Solomonik and Demmel, 2011; Tesseract,
arXiv 2105.14500.
"""

from mpipar.partition import summa

shard_axis = None
bias_is_cut = True
tokens_are_cut = False


def forward(ops, x, w, mesh, name, sizes=None):
    """y (.., N/q) of x (.., K/q), each 1/(d q) of the rows. Comm: that of summa.forward."""
    return summa.forward(ops, x, w, mesh, name)


def backward_input(ops, dy, w, mesh, name, sizes=None):
    """dx (.., K/q) of dy (.., N/q). Comm: that of summa.backward_input."""
    return summa.backward_input(ops, dy, w, mesh, name)


def backward_weight(ops, x, dy, dw, mesh, name, sizes=None):
    """dw (K/q, N/q) += x^T dy.

    Comm: that of summa.backward_weight, and one all_reduce over depth.
    """
    part = ops.zeros(dw.shape)
    summa.backward_weight(ops, x, dy, part, mesh, name)
    ops.accumulate(dw, mesh.depth.all_reduce(part, name))
