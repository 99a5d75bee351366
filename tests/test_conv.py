"""Convolution, pooling, convnet on one rank, against loops, finite differences and PyTorch."""

import itertools

import numpy as np
import pytest
from config_helpers import changed
from helpers import assert_all_close, assert_close

from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.data.images import Batch
from mpipar.layers.context import Context
from mpipar.layers.conv import Conv, MaxPool, MeanPool
from mpipar.layers.flat import FlatParams
from mpipar.layers.stash import Stash
from mpipar.ops import make
from mpipar.train.worker import Worker

SIZE, CHANNELS = (5, 7), (3, 4)
WINDOWS = [(3, 1, 1), (3, 2, 1), (2, 2, 0), (1, 1, 0), (3, 3, 2), (5, 1, 0)]
NET = {
    "model": "convnet",
    "preset": "digits",
    "layers": 2,
    "channels": 5,
    "ffn": 7,
    "classes": 4,
    "dtype": "float64",
    "batch_size": 6,
    "num_microbatches": 2,
}
SHAPES = {
    "odd": {"image_shape": (7, 9, 2)},
    "strided": {"image_shape": (9, 6, 1), "stem_stride": 2},
}


def one_rank() -> Context:
    ops = make("cpu", "float64")
    return Context(ops, Comms.solo(ops))


def conv_of(window, rng):
    """A Conv with random weights, and x."""
    context, (kernel, stride, padding) = one_rank(), window
    layer = Conv(
        context,
        "conv",
        SIZE,
        CHANNELS,
        cut="column",
        std=0.1,
        kernel=kernel,
        stride=stride,
        padding=padding,
    )
    FlatParams(context.ops, layer.params)
    for param in layer.params:
        param.data[...] = rng.standard_normal(param.data.shape)
    return layer, rng.standard_normal((2, *SIZE, CHANNELS[0]))


def loops(layer, x, window):
    """The definition: a sum over the window for every image, place and channel."""
    kernel, stride, padding = window
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    sides = [(length - kernel) // stride + 1 for length in x.shape[1:3]]
    y = np.zeros((len(x), *sides, CHANNELS[1])) + layer.b.data
    for b, p, q, i, j in itertools.product(*map(range, (len(x), *sides, kernel, kernel))):
        y[b, p, q] += x[b, p * stride + i, q * stride + j] @ layer.w.data[i, j]
    return y


def slope(function, x, direction, step=1e-5):
    """The central difference of a number along a direction of x, in place."""
    start = x.copy()
    values = []
    for sign in (1, -1):
        x[...] = start + sign * step * direction
        values.append(function())
    x[...] = start
    return (values[0] - values[1]) / (2 * step)


def passes(layer, x, dy):
    """y and dx; weight gradients are accumulated and the stash is left empty."""
    stash = Stash(Batch(x, None))
    y = layer.forward(x, stash)
    dx = layer.backward_input(dy(y), stash)
    layer.backward_weight(stash)
    assert not stash
    return y, dx


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_convolution_is_its_definition_and_its_gradients_finite_differences(window, rng):
    layer, x = conv_of(window, rng)
    weights = rng.standard_normal(loops(layer, x, window).shape)
    y, dx = passes(layer, x, lambda y: weights.copy())
    assert_close(y, loops(layer, x, window), 1e-13, "y")

    def value():
        return float((layer.forward(x, Stash(Batch(x, None))) * weights).sum())

    for array, gradient in ((x, dx), (layer.w.data, layer.w.grad), (layer.b.data, layer.b.grad)):
        direction = rng.standard_normal(array.shape)
        assert slope(value, array, direction) == pytest.approx(
            float((gradient * direction).sum()), rel=1e-6, abs=1e-8
        )


@pytest.mark.parametrize("pool", [MaxPool, MeanPool])
def test_pooling_gradients_are_finite_differences(pool, rng):
    layer, x = pool(one_rank(), "pool"), rng.standard_normal((2, *SIZE, 3))
    weights = rng.standard_normal(layer.forward(x, Stash(Batch(x, None))).shape)
    y, dx = passes(layer, x, lambda y: weights.copy())
    direction = rng.standard_normal(x.shape)

    def value():
        return float((layer.forward(x, Stash(Batch(x, None))) * weights).sum())

    expected = float((dx * direction).sum())
    assert slope(value, x, direction, 1e-7) == pytest.approx(expected, rel=1e-6)
    assert y.shape == ((2, 2, 3, 3) if pool is MaxPool else (2, 3))


def test_of_equal_entries_the_first_gets_the_gradient():
    layer, x = MaxPool(one_rank(), "pool"), np.zeros((1, 2, 2, 1))
    _, dx = passes(layer, x, np.ones_like)
    assert dx.reshape(-1).tolist() == [1, 0, 0, 0]


def net(rng, **values):
    """One rank of the convnet with random weights, its parameters, and microbatches."""
    config, _ = resolve(changed(Config(), **(NET | values)), 1)
    worker = Worker(config, Grid(0), make("cpu", "float64"), Recorder())
    params = [param for stage in worker.stages.values() for param in stage.params]
    for param in params:
        center = 1.0 if param.name.endswith("norm.w") else 0.0
        param.data[...] = rng.normal(center, 0.3, param.data.shape)
    x = rng.standard_normal((6, *config.model.image_shape))
    y = rng.integers(0, 4, 6)
    return worker, params, x, y, [Batch(x[:3], y[:3]), Batch(x[3:], y[3:])]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_gradient_of_the_convnet_is_a_finite_difference(shape, rng):
    worker, params, _, _, batches = net(rng, **SHAPES[shape])
    worker.gradients(1, batches.__getitem__)
    gradients = {param.name: param.grad.copy() for param in params}
    largest = max(float(np.abs(g).max()) for g in gradients.values())
    for param in params:
        direction = rng.standard_normal(param.data.shape)
        found = slope(lambda: worker.gradients(1, batches.__getitem__)[0], param.data, direction)
        expected = float((gradients[param.name] * direction).sum())
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6 * largest), param.name


@pytest.mark.peers
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_every_gradient_are_those_of_pytorch(shape, rng):
    torch = pytest.importorskip("torch", reason="peers: PyTorch is not installed")
    worker, params, x, y, batches = net(rng, **SHAPES[shape])
    loss, _, _ = worker.gradients(1, batches.__getitem__)
    leaves = {param.name: torch.tensor(param.data.copy()).requires_grad_() for param in params}
    expected = torch_loss(torch, leaves, worker.config.model, x, y)
    expected.backward()
    assert_close(loss, expected.item(), 1e-9, "loss")
    assert_all_close(
        {param.name: param.grad for param in params},
        {name: leaf.grad.numpy() for name, leaf in leaves.items()},
        1e-9,
    )


def torch_loss(torch, leaves, model, x, y):
    """The loss by PyTorch, whose images have their channels second."""
    functional = torch.nn.functional

    def conv(x, name, stride=1):
        w = leaves[f"{name}.w"].permute(3, 2, 0, 1)  # (N, C, k, k)
        return functional.conv2d(x, w, leaves[f"{name}.b"], stride=stride, padding=1)

    def norm(x, name):
        w, b = leaves[f"{name}.w"], leaves[f"{name}.b"]
        return functional.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2)

    def gelu(x):
        return functional.gelu(x, approximate="tanh")

    h = torch.tensor(x).permute(0, 3, 1, 2)
    h = functional.max_pool2d(gelu(conv(h, "stem", model.stem_stride)), 2)
    for index in range(model.layers):
        name = f"block{index}"
        h = h + conv(gelu(conv(norm(h, f"{name}.norm"), f"{name}.up")), f"{name}.down")
    logits = norm(h, "final_norm").mean((2, 3)) @ leaves["head.table"].T
    return functional.cross_entropy(logits, torch.tensor(y))
