"""SwiGLU and rotary positions, for NumPy and CuPy alike: part of `ArrayOps`.

silu(g) = g s(g), with the logistic function s(g) = (1 + tanh(g / 2)) / 2. An exp would overflow.
"""

import math

import numpy as np


class LlamaOps:
    """Functions of layers that Llama has and GPT-2 has not."""

    def swiglu_forward(self, h, out=None):
        """Return silu(gate) up (..., F) of h (..., 2, F), which is gate and up."""
        silu, _ = self._silu(h[..., 0, :])
        return self.xp.multiply(silu, h[..., 1, :], out=out)

    def swiglu_backward_input(self, dy, h, out=None):
        """Return (dh (..., 2, F), and silu(gate) up (..., F) once more).

        With s = s(gate): silu' = s + silu (1 - s). Each half of dh is written once: on a CPU, a
        pass over its gaps takes twice as long as one over a whole array.
        """
        up = h[..., 1, :]
        dh = self.xp.empty(h.shape, h.dtype) if out is None else out
        y, s = self._silu(h[..., 0, :])
        self.xp.multiply(dy, y, out=dh[..., 1, :])
        s *= self.scalar(0.5)
        slope = self.scalar(1.0) - s
        slope *= y
        slope += s
        slope *= up
        self.xp.multiply(slope, dy, out=dh[..., 0, :])
        y *= up
        return dh, y

    def _silu(self, gate):
        """Return (silu(gate), 2 s(gate))."""
        silu = gate * self.scalar(0.5)
        twice = self.xp.tanh(silu)
        twice += self.scalar(1.0)
        silu *= twice
        return silu, twice

    def rope_forward(self, x, positions, table):
        """Turn each head of x (B, T, H, d) in place by the angles of its position; return x.

        Number i < d/2 and number i + d/2 of a head are the coordinates of a point. positions (T,),
        or (B, T) where rows differ. table (P, 2, d/2): cosine and sine of its angle at each
        position.
        """
        self._rotate(x, table[positions, 0], table[positions, 1])
        return x

    def rope_backward_input(self, dy, positions, table):
        """Turn dy in place by the angles of rope_forward backwards; return dy."""
        self._rotate(dy, table[positions, 0], -table[positions, 1])
        return dy

    def _rotate(self, x, cos, sin):
        """Turn x (B, T, H, d) in place; cos and sin (T, d/2) or (B, T, d/2)."""
        assert x.shape[-1] == 2 * cos.shape[-1], (x.shape, cos.shape)
        points = x.reshape(*x.shape[:-1], 2, -1)
        turned = points[..., ::-1, :] * self.xp.stack([-sin, sin], axis=-2)[..., None, :, :]
        x *= self.xp.concatenate([cos, cos], axis=-1)[..., None, :]
        x += turned.reshape(x.shape)


def rope_table(length, width, theta, scaling):
    """Return cosine and sine (P, 2, d/2) of the angles p f_i at positions p < length, float64."""
    angles = np.outer(np.arange(length), rope_frequencies(width, theta, scaling))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def rope_frequencies(width, theta, scaling):
    """Return f_i = theta^(-2i/d) of the d/2 points of a head, float64.

    scaling: (factor, low, high, length) of Llama 3, or () for none. A rotation that turns fewer
    than `low` times within `length` positions becomes slower by `factor`, one that turns more than
    `high` times stays. Between them the two are mixed. Source: Dubey et al., arXiv 2407.21783, and
    Hugging Face's `rope_type: llama3`.
    """
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    if not scaling:
        return frequencies
    factor, low, high, length = scaling
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)
