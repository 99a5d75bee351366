"""Two convolutions cut by channels: y = conv_down(gelu(conv_up(x))).

    mpiexec -n 2 python docs/examples/convolution.py

A convolution is a product: under each place of the kernel lies a patch of k * k * C numbers, which
the weights (k * k * C, N) turn into N channels. So the two cuts of a linear layer are the two cuts
of a convolution. The first one is cut by its outputs: each rank computes its share of the channels
between, and sends nothing forward. The second one is cut by its inputs: each rank has patches of
its own channels, and one all-reduce adds up the results. Backward, the first one has the sum: of
the gradient of its patches, k * k numbers for each one of an image.

Letters: B images, H and W their height and width, C channels, F channels between, q ranks.
"""

import numpy as np
from mpi4py import MPI

import mpipar

WORLD = MPI.COMM_WORLD
OPS = mpipar.make_ops("cpu", "float64")
B, H, W, C, F = 2, 5, 4, 3, 10
K = 3  # width of the kernel


def unfold(x):
    """Return the patches (B, H, W, k*k*C) of images x (B, H, W, C) with an edge of zeros."""
    edge = K // 2
    x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    patches = np.lib.stride_tricks.sliding_window_view(x, (K, K), axis=(1, 2))  # (B, H, W, C, k, k)
    patches = patches.transpose(0, 1, 2, 4, 5, 3)
    return np.ascontiguousarray(patches).reshape(*patches.shape[:3], -1)


def fold(dpatches):
    """Return dx (B, H, W, C): each entry sums over the patches (B, H, W, k*k*C) that contain it."""
    batch, height, width, numbers = dpatches.shape
    dpatches = dpatches.reshape(batch, height, width, K, K, numbers // K**2)
    edge = K // 2
    dx = np.zeros((batch, height + 2 * edge, width + 2 * edge, numbers // K**2))
    for i, j in np.ndindex(K, K):
        dx[:, i : i + height, j : j + width] += dpatches[:, :, :, i, j]
    return np.ascontiguousarray(dx[:, edge:-edge, edge:-edge])


class Convolution:
    """y (B, H, W, N) = patches of x (B, H, W, C) @ w + b. cut: "column" on N, "row" on C.

    Comm: that of the linear layer's cut.
    """

    def __init__(self, context, name, channels, cut):
        inner, outer = channels
        self.linear = mpipar.Linear(
            context, name, (K, K, inner), (outer,), cut=cut, std=0.3, in_axis=2
        )

    def forward(self, x, stash):
        """Return y, and keep the patches of x. Comm: row: one all_reduce of y."""
        return self.linear.forward(unfold(x), stash)

    def backward_input(self, dy, stash):
        """Return dx of dy. Comm: column: one all_reduce of the gradient of the patches."""
        return fold(self.linear.backward_input(dy, stash))

    def backward_weight(self, stash):
        """Add the gradients of w and b, for which a rank has all that its shard needs."""
        self.linear.backward_weight(stash)


def pair(comms, x, dy):
    """Return y and dx (B, H, W, C), and the parameters with their gradients of this rank."""
    context = mpipar.Context(OPS, comms)
    up = Convolution(context, "conv.up", (C, F), cut="column")
    down = Convolution(context, "conv.down", (F, C), cut="row")
    params = [*up.linear.params, *down.linear.params]
    mpipar.FlatParams(OPS, params).initialize(seed=1, spread=0.1)
    stash = mpipar.Stash()
    h = up.forward(x, stash)  # (B, H, W, F/q)
    y = down.forward(OPS.gelu_forward(h), stash)
    da = down.backward_input(dy, stash)  # (B, H, W, F/q)
    dx = up.backward_input(OPS.gelu_backward_input(da, h), stash)
    for layer in (down, up):
        layer.backward_weight(stash)
    return y, dx, params


def shard_of(param, whole):
    """Return the part of the whole gradient of a tensor that belongs to this rank's shard."""
    return whole[tuple(slice(first, stop) for first, stop in param.box)]


def own(param):
    """Return this rank's gradient of a tensor, without the padding."""
    return param.grad[tuple(slice(0, stop - first) for first, stop in param.box)]


recorder = mpipar.Recorder()
comms = mpipar.Comms(mpipar.Grid(WORLD.rank, {"tp": WORLD.size}), OPS, recorder, WORLD)
x, dy = np.random.default_rng(0).standard_normal((2, B, H, W, C))
*cut, params = pair(comms, x, dy)
*whole, whole_params = pair(mpipar.Comms.solo(OPS), x, dy)
cut += [own(param) for param in params]
whole += [shard_of(param, one.grad) for param, one in zip(params, whole_params, strict=True)]
difference = max(np.abs(a - b).max(initial=0) for a, b in zip(cut, whole, strict=True))
difference = WORLD.allreduce(difference, MPI.MAX)
if WORLD.rank == 0:
    print(f"largest difference from one rank: {difference:.1e}")
    for key, counter in recorder.counters.items():
        print(f"{key.operation} of {key.name} over {key.axis}, {counter.payload_bytes} bytes")
