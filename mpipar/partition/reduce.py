"""Cut by input channels, each layer alone: y (.., N) = sum over ranks of its x (.., K/q) @ w (K/q,
N).

The mirror image of the `gather` cut. x is whole on every rank, each takes its own channels of it
and all sum what they make: one all-reduce forward, and one all-gather backward, because each rank
makes only its own channels of dx. Same gradients; it is here to be compared.
"""

from mpipar.grid import piece
from mpipar.partition import row
from mpipar.partition.gather import collect

shard_axis = 0
bias_is_cut = False


def forward(ops, x, w, comm, name, tokens=None):
    """y (.., N), summed over everybody's channels of x (.., K). Comm: one all_reduce of y."""
    return row.forward(ops, _own(x, comm), w, comm, name)


def backward_input(ops, dy, w, comm, name, tokens=None):
    """dx (.., K) of dy (.., N). Comm: one all_gather of dx."""
    return collect(ops.matmul_backward_input(dy, w), comm, name), dy


def backward_weight(ops, x, dy, dw, comm, name, tokens=None):
    """dw (K/q, N) += (own channels of x)^T dy. Comm: none."""
    ops.matmul_backward_weight(_own(x, comm), dy, dw)


def _own(x, comm):
    """This rank's channels of the whole x (.., K), as a view; q divides K."""
    return x[..., piece(x.shape[-1], comm.size, comm.index)]
