"""The whole decoder against PyTorch's autograd and AdamW in float64, to 1e-9."""

import numpy as np
import pytest
from config_helpers import changed
from helpers import assert_all_close, assert_close

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.model import ARCHS
from mpipar.config.resolve import resolve
from mpipar.layers.stash import Batch
from mpipar.ops import make
from mpipar.train.optim import learning_rate
from mpipar.train.worker import Worker

pytest.importorskip("torch", reason="peers: PyTorch is not installed")

import torch

from bench.step.torch_decoder import TorchDecoder

pytestmark = pytest.mark.peers
TOL = 1e-9
SHAPES = {
    "odd": {"layers": 2, "d_model": 15, "heads": 3, "ffn": 22, "seq_len": 7, "vocab_size": 29},
    "rms": {"layers": 2, "d_model": 15, "heads": 3, "seq_len": 7, "vocab_size": 29, "norm": "rms"},
    "llama": {
        "layers": 2,
        "d_model": 12,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 4,
        "ffn": 22,
        "seq_len": 7,
        "vocab_size": 29,
        "arch": "llama",
        **ARCHS["llama"],
        "bias": "all",
        "rope_theta": 50.0,
        "rope_scaling": (4.0, 1.0, 3.0, 12.0),
        "norm_eps": 1e-2,
    },
    "mixtral": {
        "layers": 2,
        "d_model": 12,
        "heads": 2,
        "ffn": 22,
        "seq_len": 7,
        "vocab_size": 29,
        "arch": "mixtral",
        **ARCHS["mixtral"],
        "experts": 5,
        "router_balance": "none",
    },
    "one of each": {"layers": 1, "d_model": 4, "heads": 1, "ffn": 1, "seq_len": 1, "vocab_size": 2},
    "wide heads": {"layers": 1, "d_model": 34, "heads": 2, "seq_len": 19, "vocab_size": 64},
    "deep": {"layers": 5, "d_model": 24, "heads": 8, "ffn": 50, "seq_len": 33, "vocab_size": 257},
}


def both_sides(rng, num_microbatches=2, **values):
    """One rank of ours, and PyTorch's, from the same random weights and rows."""
    values = {
        "dtype": "float64",
        "batch_size": 6,
        "eps": 1e-8,
        "lr": 0.03,
        "warmup_steps": 2,
        "steps": 4,
        "num_microbatches": num_microbatches,
    } | values
    config, _ = resolve(changed(**values), 1)
    model = config.model
    worker = Worker(config, Grid(0), make("cpu", "float64"), Recorder())
    params = [param for stage in worker.stages.values() for param in stage.params]
    for param in params:  # no bias is zero and no scale one, unlike at the start of training
        center = 1.0 if param.name.endswith(("norm1.w", "norm2.w", "final_norm.w")) else 0.0
        param.data[...] = rng.normal(center, 0.3, param.data.shape)
    rows = rng.integers(0, model.vocab_size, (6, model.seq_len + 1))
    parts = np.split(rows, num_microbatches)
    positions = np.arange(model.seq_len)

    def batch_of(part):
        return Batch(part[:, :-1].copy(), part[:, 1:].copy(), positions)

    batches = [batch_of(part) for part in parts]
    theirs = TorchDecoder(config, batch_of(rows), {param.name: param.data for param in params})
    return worker, params, batches.__getitem__, theirs


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_every_gradient(shape, tied, rng):
    ours, params, get_batch, theirs = both_sides(rng, **SHAPES[shape] | {"tied": tied})
    loss, norm, _ = ours.gradients(1, get_batch)
    assert_close(loss, theirs.forward_backward(1), TOL, "loss")
    expected = theirs.gradients()
    assert_all_close({param.name: param.grad for param in params}, expected, TOL)
    assert_close(norm, np.sqrt(sum((x**2).sum() for x in expected.values())), TOL, "norm")
    assert ("head.table" in expected) == (not tied)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("shape", ["odd", "deep", "llama"])
def test_weights_after_three_steps(shape, clip, tied, rng):
    ours, params, get_batch, theirs = both_sides(
        rng, optimizer="adamw", clip=clip, weight_decay=0.3, **SHAPES[shape] | {"tied": tied}
    )
    before = theirs.weights()
    for step in (1, 2, 3):
        loss = theirs.forward_backward(step)
        norm = theirs.update(step)
        result = ours.train_step(step, get_batch)
        assert_close(result.loss, loss, TOL, f"loss of step {step}")
        assert_close(result.grad_norm, norm, TOL, f"norm of step {step}")
        assert norm > clip, "nothing would be clipped"
    after = theirs.weights()
    assert_all_close({param.name: param.data for param in params}, after, TOL)
    assert (after["embedding.tokens"] != before["embedding.tokens"]).all()


def matrices_of(name, x):
    """The hidden matrices of a tensor, as views (rows, columns) of x; [] of what AdamW updates."""
    if x.ndim < 2 or not (name.startswith("block") and name.endswith(".w")):
        return []
    if name.endswith("attn.qkv.w"):  # (D, 3, H, d)
        return [x[:, k].reshape(len(x), -1) for k in range(3)]
    if name.endswith("attn.proj.w") and x.shape[0] > x.shape[1]:  # (D, H, d)
        return [x.reshape(len(x), -1)]
    return [x.reshape(-1, x.shape[-1])]  # (H, d, D), or two dimensions


def in_float64(grad, coefficients, steps, eps):
    """PyTorch's iteration, which rounds to bfloat16, without that."""
    a, b, c = coefficients
    x = grad.T if len(grad) > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(grad) > grad.shape[1] else x


@pytest.mark.parametrize("shape", ["odd", "llama"])
def test_muon_is_that_of_pytorch(shape, rng, monkeypatch):
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float64)
    ours, params, get_batch, _ = both_sides(
        rng, optimizer="muon", clip=0.0, weight_decay=0.3, **SHAPES[shape]
    )
    hidden = {param: matrices_of(param.name, param.data) for param in params}
    theirs = {
        param: [torch.nn.Parameter(torch.tensor(x)) for x in own] for param, own in hidden.items()
    }
    optimizer = torch.optim.Muon(
        [x for own in theirs.values() for x in own],
        weight_decay=0.3,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in (1, 2, 3):
        _, norm, _ = ours.gradients(step, get_batch)
        for param, own in theirs.items():
            for x, grad in zip(own, matrices_of(param.name, param.grad), strict=True):
                x.grad = torch.tensor(grad)
        lr = learning_rate(ours.config.train, step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        ours.update(norm, lr, step)
    found = {(p.name, k): x for p, own in hidden.items() for k, x in enumerate(own)}
    right = {
        (p.name, k): x.detach().numpy() for p, own in theirs.items() for k, x in enumerate(own)
    }
    assert len(found) == {"odd": 12, "llama": 14}[shape]
    assert_all_close(found, right, TOL)
