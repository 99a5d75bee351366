"""Array functions against PyTorch's own, gradients by its autograd, in float64 to 1e-9."""

import numpy as np
import pytest
from helpers import assert_close
from ops_cases import parts, plain, positions_of

from mpipar.ops import make

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.peers
TOL = 1e-9


@pytest.fixture(params=["plain", "tuned"])
def ops(request):
    return plain() if request.param == "plain" else make("cpu", "float64")


def leaf(x):
    """A tensor with its own copy of x, of which a gradient is wanted."""
    return torch.tensor(x, requires_grad=True)


def gradients(y, dy, *leaves):
    """Gradients of sum(y dy) by the leaves, as NumPy arrays."""
    return [g.numpy() for g in torch.autograd.grad(y, leaves, torch.from_numpy(dy))]


def test_linear(ops, rng):
    x, w = rng.standard_normal((3, 70, 37)), rng.standard_normal((37, 53))
    b, dy = rng.standard_normal(53), rng.standard_normal((3, 70, 53))
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    ty = tx @ tw + tb
    dx, dw, db = gradients(ty, dy, tx, tw, tb)
    got_dw, got_db = np.zeros_like(w), np.zeros_like(b)
    ops.matmul_tn_add(x, dy, got_dw)
    ops.bias_backward_weight(dy, got_db)
    y = ops.bias_forward(ops.matmul(x, w), b)
    assert_close(y, ty.detach().numpy(), TOL, "y")
    assert_close(ops.matmul_nt(dy, w), dx, TOL, "dx")
    assert_close(got_dw, dw, TOL, "dw")
    assert_close(got_db, db, TOL, "db")


def test_gelu(ops, rng):
    x, dy = 3 * rng.standard_normal((3, 70, 37)), rng.standard_normal((3, 70, 37))
    tx = leaf(x)
    ty = functional.gelu(tx, approximate="tanh")
    assert_close(ops.gelu_forward(x), ty.detach().numpy(), TOL, "y")
    assert_close(ops.gelu_backward_input(dy, x), gradients(ty, dy, tx)[0], TOL, "dx")


def test_layernorm(ops, rng):
    x, dy = 3 * rng.standard_normal((3, 70, 37)) + 5, rng.standard_normal((3, 70, 37))
    w, b = rng.standard_normal(37), rng.standard_normal(37)
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    ty = functional.layer_norm(tx, (37,), tw, tb, 1e-5)
    dx, dw, db = gradients(ty, dy, tx, tw, tb)
    y, mean, rstd = ops.layernorm_forward(x, w, b, 1e-5)
    got_dw, got_db = np.zeros_like(w), np.zeros_like(b)
    ops.layernorm_backward_weight(dy, x, mean, rstd, got_dw, got_db)
    assert_close(y, ty.detach().numpy(), TOL, "y")
    assert_close(ops.layernorm_backward_input(dy, x, w, mean, rstd), dx, TOL, "dx")
    assert_close(got_dw, dw, TOL, "dw")
    assert_close(got_db, db, TOL, "db")


def test_rmsnorm(ops, rng):
    x, dy = 3 * rng.standard_normal((3, 70, 37)) + 5, rng.standard_normal((3, 70, 37))
    w, got_dw = rng.standard_normal(37), np.zeros(37)
    tx, tw = leaf(x), leaf(w)
    ty = functional.rms_norm(tx, (37,), tw, 1e-5)
    dx, dw = gradients(ty, dy, tx, tw)
    y, rstd = ops.rmsnorm_forward(x, w, 1e-5)
    ops.rmsnorm_backward_weight(dy, x, rstd, got_dw)
    assert_close(y, ty.detach().numpy(), TOL, "y")
    assert_close(ops.rmsnorm_backward_input(dy, x, w, rstd), dx, TOL, "dx")
    assert_close(got_dw, dw, TOL, "dw")


@pytest.mark.parametrize("kind", ["increasing", "shuffled", "ties"])
def test_attention(ops, rng, kind):
    qkv, dy = rng.standard_normal((2, 131, 3, 3, 5)), rng.standard_normal((2, 131, 3, 5))
    positions = positions_of(kind, 131, rng)
    tqkv = leaf(qkv)
    q, k, v = (tqkv[:, :, i].transpose(1, 2) for i in range(3))
    visible = torch.from_numpy(positions[None, :] <= positions[:, None])
    ty = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
    y, probs = ops.attention_forward(*parts(qkv), positions, positions)
    assert_close(y, ty.detach().numpy(), TOL, "y")
    dqkv = np.empty_like(qkv)
    ops.attention_backward_input(
        dy, *parts(qkv), probs, positions, positions, out=parts(dqkv))
    assert_close(dqkv, gradients(ty, dy, tqkv)[0], TOL, "dqkv")


@pytest.mark.parametrize("form", ["saved", "block"])
def test_attention_with_shared_key_heads(ops, rng, form):
    """Six query heads over two key heads, 67 queries over 41 keys; every query sees a key."""
    q, dy = (rng.standard_normal((2, 67, 6, 5)) for _ in range(2))
    k, v = (rng.standard_normal((2, 41, 2, 5)) for _ in range(2))
    q_pos, k_pos = rng.permutation(90)[:67] + 1, rng.permutation(41)
    leaves = tuple(map(leaf, (q, k, v)))
    ty = functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), enable_gqa=True,
        attn_mask=torch.from_numpy(k_pos[None, :] <= q_pos[:, None])).transpose(1, 2)
    if form == "saved":
        y, saved = ops.attention_forward(q, k, v, q_pos, k_pos)
        grads = ops.attention_backward_input(dy, q, k, v, saved, q_pos, k_pos)
    else:
        y, stats = ops.attention_block_forward(q, k, v, q_pos, k_pos)
        grads = ops.attention_block_backward(
            dy, q, k, v, stats, ops.attention_delta(dy, y), q_pos=q_pos, k_pos=k_pos)
    assert_close(y, ty.detach().numpy(), TOL, "y")
    for name, grad, expected in zip("qkv", grads, gradients(ty, dy, *leaves), strict=True):
        assert_close(grad, expected, TOL, f"d{name}")


def test_embedding(ops, rng):
    ids, table = rng.integers(0, 11, (3, 7)), rng.standard_normal((11, 5))
    dy, dtable = rng.standard_normal((3, 7, 5)), np.zeros((11, 5))
    ttable = leaf(table)
    ty = functional.embedding(torch.from_numpy(ids), ttable)
    ops.embedding_backward_weight(ids, dy, dtable, 0)
    assert_close(ops.embedding_forward(ids, table, 0), ty.detach().numpy(), TOL, "y")
    assert_close(dtable, gradients(ty, dy, ttable)[0], TOL, "dtable")


def test_cross_entropy(ops, rng):
    logits, targets = 3 * rng.standard_normal((70, 37)), rng.integers(0, 37, 70)
    tlogits = leaf(logits)
    tloss = functional.cross_entropy(tlogits, torch.from_numpy(targets), reduction="none")
    dlogits = gradients(tloss, np.full(70, 1 / 70), tlogits)[0]
    stats = ops.cross_entropy_forward(logits, targets, 0, 37)
    loss, sums = ops.cross_entropy_combine(stats[None])
    assert_close(loss, tloss.detach().numpy(), TOL, "loss")
    got = ops.cross_entropy_backward_input(logits, targets, sums, 0, 37, 1 / 70)
    assert_close(got, dlogits, TOL, "dlogits")


def test_adamw_over_several_steps(ops, rng):
    data, m, v = rng.standard_normal(101), np.zeros(101), np.zeros(101)
    parameter = torch.nn.Parameter(torch.tensor(data))
    optimizer = torch.optim.AdamW(
        [parameter], lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2
    )
    for step in range(1, 6):
        grad = rng.standard_normal(101)
        parameter.grad = torch.tensor(grad)
        optimizer.step()
        ops.adamw_step(data, grad, m, v, lr=0.03, beta1=0.8, beta2=0.95, eps=1e-6,
                       weight_decay=0.2, step=step)
        assert_close(data, parameter.detach().numpy(), TOL, f"weights after step {step}")


def test_sgd(ops, rng):
    data, grad = rng.standard_normal(101), rng.standard_normal(101)
    parameter = torch.nn.Parameter(torch.tensor(data))
    parameter.grad = torch.tensor(grad)
    torch.optim.SGD([parameter], lr=0.03).step()
    ops.sgd_step(data, grad, 0.03)
    assert_close(data, parameter.detach().numpy(), TOL, "weights")
