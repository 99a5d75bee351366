"""The products of one training step, taken out of it and multiplied alone: what a step rests on.

They are those of one rank's step with NumPy's kernels, in their order, on the step's own arrays.
PyTorch multiplies the same arrays. So the rates of both libraries compare, and the time of a step
over that of its products says what everything else costs.
"""

from __future__ import annotations

from math import prod
from unittest.mock import patch

import numpy as np

from mpipar.ops import numpy_ops


class Noting:
    """NumPy, whose products are noted too."""

    def __init__(self, noted: list):
        self.noted = noted

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, x, y, out):
        """Multiply, and note the operands and the result."""
        self.noted.append((x, y, out))
        return np.matmul(x, y, out=out)


def products_of(side, step: int) -> list[tuple]:
    """(left, right, result) of every product of a step of a side without other ranks."""
    noted, multiply = [], numpy_ops._product

    def product(x, w):
        y = multiply(x, w)
        noted.append((x, w, y))
        return y

    with patch.object(numpy_ops, "np", Noting(noted)), patch.object(
            numpy_ops, "_product", product):
        side.forward_backward(step)
    return noted


def flops(products) -> int:
    """Floating-point operations of all products."""
    return sum(2 * prod(result.shape) * left.shape[-1] for left, _, result in products)


class Products:
    """A side that multiplies and does nothing else.

    matmul: of a library. convert: gives one of its arrays on the memory of one of NumPy's.
    """

    def __init__(self, products, matmul=np.matmul, convert=lambda x: x):
        self.matmul, self.flops = matmul, flops(products)
        self.products = [tuple(map(convert, one)) for one in products]

    def forward_backward(self, step):
        """Multiply all."""
        for left, right, result in self.products:
            self.matmul(left, right, out=result)

    def update(self, step):
        """There is nothing to update."""

    def synchronize(self):
        """There is nothing to wait for on a CPU."""
