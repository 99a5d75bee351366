"""Exercise 2c: the weight gradient of a matrix product. Fill the blank, then

python -m pytest docs/examples/exercises/weight_gradient.py
"""

import numpy as np


def backward_weight(x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
    """Add the gradient of w to dw (K, N), where y = x w, x is (T, K) and dy is (T, N)."""
    ...  # your code


def test_against_finite_differences() -> None:
    random = np.random.default_rng(2)
    x, dy, before = (random.integers(-3, 4, shape) * 1.0 for shape in ((3, 4), (3, 5), (4, 5)))
    dw = before.copy()
    backward_weight(x, dy, dw)
    for i, j in np.ndindex(dw.shape):  # the loss sum(dy * (x w)) is linear in w, so this is exact
        w = np.zeros(dw.shape)
        w[i, j] = 1.0
        assert dw[i, j] - before[i, j] == np.sum(dy * (x @ w)), f"dw[{i},{j}]"
