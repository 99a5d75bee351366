"""Sixteen-bit weights and activations on any device: widen to float32, compute, round once.

A wrapper around the float32 functions of NumPy, CuPy or shapes. What enters a function is widened
exactly, what leaves it as an activation is rounded to the nearest; so products accumulate in
float32, and one rounding stands between two functions. What a device does so by itself, such as
products on tensor cores, is left to it (`takes_16_bits`). Gradients of parameters, statistics of
norms and softmax, losses and the optimizer are float32 and never rounded.
"""

import ml_dtypes
import numpy as np

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}

# Function: which of its results are activations. The others stay float32.
ACTIVATIONS = {
    "matmul": (0,), "matmul_nt": (0,), "gelu_forward": (0,),
    "gelu_backward_input": (0,), "layernorm_forward": (0,), "layernorm_backward_input": (0,),
    "rmsnorm_forward": (0,), "rmsnorm_backward_input": (0,),
    "attention_forward": (0, 1), "attention_backward_input": (0, 1, 2), "position_forward": (0,),
    "unfold_forward": (0,), "unfold_backward_input": (0,), "maxpool_forward": (0,),
    "maxpool_backward_input": (0,), "meanpool_forward": (0,), "meanpool_backward_input": (0,),
    # Added to float32 gradients, or float32 results.
    "matmul_tn_add": (), "bias_backward_weight": (), "layernorm_backward_weight": (),
    "rmsnorm_backward_weight": (),
    "embedding_backward_weight": (), "position_backward_weight": (), "cross_entropy_forward": (),
    "argmax_forward": (), "attention_block_forward": (), "attention_block_backward": (),
    "attention_delta": (),
}
# These move values, add two numbers of one type (which rounds once as it is), or work on what is
# float32 anyway.
PASSED = (
    "asarray", "to_host", "to_pinned", "pinned", "synchronize", "fill", "copy",
    "scale", "accumulate", "bias_forward", "embedding_forward", "sum", "square_sum",
    "cross_entropy_combine", "attention_merge", "sgd_step", "adamw_step",
)


def quiet(function):
    """The function without warnings: of what lies beyond 16 bits the loss scale is told."""
    return np.errstate(over="ignore", invalid="ignore")(function)


class MixedOps:
    """The array functions with activations in `dtype`: "bfloat16" or "float16".

    exact: the float32 functions. statistics: the type of gradients, master weights and sums.
    """

    def __init__(self, exact, dtype):
        self.exact, self.xp, self.device = exact, exact.xp, exact.device
        self.dtype, self.statistics = DTYPES[dtype], exact.dtype
        for name, results in ACTIVATIONS.items():
            setattr(self, name, quiet(self._rounded(getattr(exact, name), results)))
        for name in (*PASSED, *exact.takes_16_bits):
            if hasattr(exact, name):  # what only some devices need is missing on the others
                setattr(self, name, quiet(getattr(exact, name)))

    def __getattr__(self, name):
        """What the shapes count: flops, live, peak."""
        return getattr(self.exact, name)

    def _rounded(self, function, results):
        """The function on widened arguments, the results at these places rounded.

        out: arrays to round all results to, of a function that takes some.
        """

        def call(*arguments, out=None, **named):
            made = function(*map(self._wide, arguments), **named)
            if out is not None:
                for to, x in zip(out, made, strict=True):
                    self.copy(to, x)
                return out
            if not isinstance(made, tuple):
                return made.astype(self.dtype) if results else made
            return tuple(x.astype(self.dtype) if i in results else x for i, x in enumerate(made))

        return call

    def _wide(self, x):
        """x in float32 where it is an array of 16 bits."""
        return x.astype(self.statistics) if getattr(x, "dtype", None) == self.dtype else x

    def empty(self, shape, dtype=None, label="stash"):
        """Return an uninitialised array."""
        return self.exact.empty(shape, self.dtype if dtype is None else dtype, label)

    def zeros(self, shape, dtype=None, label="stash"):
        """Return an array of zeros."""
        return self.exact.zeros(shape, self.dtype if dtype is None else dtype, label)

    @quiet
    def add_parts(self, parts):
        """Return the sum of parts (size, ...) over its first dimension, rounded once."""
        return self._wide(parts).sum(axis=0).astype(self.dtype)

    def bias_gelu_forward(self, x, b):
        """Add b (M,) to the freshly made x (..., M) in place and return GELU of the sum."""
        return self.gelu_forward(self.bias_forward(x, b))

    @quiet
    def cross_entropy_backward_input(self, logits, targets, lse, start, num_valid, scale):
        """Write (softmax - onehot) * scale, made in float32, over logits and return that array."""
        self.copy(logits, self.exact.cross_entropy_backward_input(
            self._wide(logits), targets, lse, start, num_valid, scale))
        return logits
