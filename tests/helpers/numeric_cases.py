"""Hostile inputs of the array functions: the exact results, here and in PyTorch.

A family of functions has three forms. `exact` is the formula in NumPy's widest type, from the very
inputs. `ours` calls an implementation. `theirs` calls PyTorch, gradients by its autograd. Each
returns name -> array; `exact` also the size of the terms that a result adds up, where that is not
its own size. For attention see numeric_attention.py.
"""

from types import SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mpipar.ops.arrays import AdamWStep

WIDE = np.longdouble
EPS = {np.dtype(np.float32): 2.0**-23, np.dtype(ml_dtypes.bfloat16): 2.0**-7}
# Results below this count as it: beside them, a number that is too small for float32 is a rounding.
SMALL = 2.0**-126 / 2.0**-24
LARGEST = float(np.finfo(np.float32).max)
MAGNITUDES = (1e-30, 1e-12, 1e-3, 1.0, 4.0, 20.0, 90.0, 1e4, 1e8, 1.4e13, 1e18)


class Family(NamedTuple):
    """cases(rng) gives name -> case. axis: of `error`."""

    cases: object
    exact: object
    ours: object
    theirs: object
    axis: object = -1


def error(got, exact, axis):
    """Largest error of a result relative to the largest exact number along `axis`; NaN is inf.

    exact: the result, or (result, size of its terms). axis: () compares each number with itself, -1
    with its row. What no float32 holds is left out.
    """
    exact, terms = exact if isinstance(exact, tuple) else (exact, SMALL)
    exact, terms = np.broadcast_arrays(np.asarray(exact, WIDE), terms)
    got = np.asarray(got).astype(WIDE)
    assert got.shape == exact.shape, (got.shape, exact.shape)
    sizes = np.maximum(np.maximum(np.abs(exact), np.abs(terms)), SMALL)
    scale = np.max(sizes, axis=axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        off = np.where(np.abs(exact) > LARGEST, 0.0, np.abs(got - exact) / scale)
    return float(np.max(np.where(np.isnan(off), np.inf, off), initial=0.0))


class Case(SimpleNamespace):
    """Arrays of numbers that type `kind` holds, and whatever else a family needs."""

    kind = np.dtype(np.float32)

    def rounded(self, kind):
        """The case with its real numbers rounded to a type; they stay float32 arrays."""
        found = {
            name: x.astype(kind).astype(np.float32) if _is_real(x) else x
            for name, x in vars(self).items()
        }
        return Case(**found | {"kind": np.dtype(kind)})

    def wide(self, names):
        return [getattr(self, name).astype(WIDE) for name in names.split()]

    def on(self, ops, names):
        """New arrays of an implementation, real numbers in its type."""
        arrays = [getattr(self, name) for name in names.split()]
        return [ops.asarray(x.astype(ops.dtype) if _is_real(x) else x.copy()) for x in arrays]

    def leaves(self, torch, names):
        """Tensors, of which gradients are wanted."""
        kind = getattr(torch, self.kind.name)
        return [
            torch.tensor(getattr(self, name)).to(kind).requires_grad_() for name in names.split()
        ]


def _is_real(x):
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def float32(x):
    return np.asarray(x).astype(np.float32)


def spread(rng, *shape, magnitude=1.0):
    """Numbers of both signs and of one order of magnitude."""
    return float32(magnitude * rng.uniform(0.5, 1.0, shape) * rng.choice([-1.0, 1.0], shape))


def beside(rng, *shape, offset):
    """Numbers that differ from an offset by a few roundings."""
    step = np.spacing(np.float32(abs(offset)))
    return float32(np.float32(offset) + step * rng.integers(-6, 7, shape))


FEW = (
    "1",
    "90",
    "1e+18",
    "beside -10000",
    "beside 1e+08",
    "all 0.1",
    "all -1e+08",
    "all 1e+18",
    "of all magnitudes",
)  # kinds of rows where there are many numbers


def rows_of(rng, count, width):
    """Name -> (count, width): every kind of row, or a few of large arrays."""
    kinds = {
        f"{magnitude:g}": spread(rng, count, width, magnitude=magnitude) for magnitude in MAGNITUDES
    }
    kinds |= {
        f"beside {offset:g}": beside(rng, count, width, offset=offset)
        for offset in (3.0, -1e4, 1e8, -1e13, 1e18)
    }
    kinds |= {
        f"all {value:g}": np.full((count, width), value, np.float32)
        for value in (0.0, 0.1, 1e4, -1e8, 1e18)
    }
    mixed = spread(rng, count, width) * float32(10.0 ** rng.uniform(-30, 18, (count, width)))
    kinds["of all magnitudes"] = mixed
    return {name: x for name, x in kinds.items() if count * width < 2000 or name in FEW}


# Elementwise: GELU and SwiGLU.


def elementwise_cases(rng):
    rows = {
        "a grid": float32(np.linspace(-12.0, 12.0, 2401)),
        "far below": float32(np.linspace(-100.0, -12.0, 881)),
        "far above": float32(np.linspace(12.0, 100.0, 881)),
        "powers": float32(
            np.concatenate([sign * 10.0 ** np.arange(-30, 18.5, 0.5) for sign in (-1, 1)])
        ),
    }
    rows |= {name: x.reshape(-1) for name, x in rows_of(rng, 1, 300).items()}
    return {
        name: Case(
            x=x[None], dy=spread(rng, 1, x.size), up=spread(rng, 1, x.size), b=spread(rng, x.size)
        )
        for name, x in rows.items()
    }


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _beside_flushed(case, result, exponent=1, terms=None):
    """The result beside the size of its terms, and that of an exponential of no normal number.

    exponent: the size of what was rounded before the exponential of it.
    """
    terms = np.abs(result if terms is None else terms) * exponent
    return result, np.maximum(terms, SMALL * np.maximum(1, np.abs(case.x)))


def gelu_exact(case):
    a = np.sqrt(2 / WIDE(np.pi))
    b = WIDE(0.044715) * a

    x, dy = case.wide("x dy")
    u, slope = x * (a + b * x * x), a + 3 * b * x * x
    s, more = _sigmoid(2 * u), x * _sigmoid(2 * u) * _sigmoid(-2 * u) * 2 * slope
    return {
        "y": _beside_flushed(case, x * _sigmoid(2 * u), 1 + np.abs(2 * u)),
        "dx": _beside_flushed(case, dy * (s + more), 1 + np.abs(2 * u), dy * (s + np.abs(more))),
    }


def gelu_ours(ops, case):
    x, dy = case.on(ops, "x dy")
    return {"y": ops.gelu_forward(x), "dx": ops.gelu_backward_input(dy, x)}


def gelu_theirs(torch, case):
    x, dy = case.leaves(torch, "x dy")
    y = torch.nn.functional.gelu(x, approximate="tanh")
    return {"y": y, "dx": torch.autograd.grad(y, x, dy)[0]}


def swiglu_exact(case):
    g, up, dy = case.wide("x up dy")
    s = _sigmoid(g)
    more = g * s * _sigmoid(-g)
    y = _beside_flushed(case, g * s * up)
    return {
        "y": y,
        "y again": y,
        "dup": _beside_flushed(case, dy * g * s),
        "dgate": _beside_flushed(case, dy * up * (s + more), 1, dy * up * (s + np.abs(more))),
    }


def swiglu_ours(ops, case):
    h, (dy,) = Case(h=np.stack([case.x, case.up], axis=-2)).on(ops, "h")[0], case.on(ops, "dy")
    dh, again = ops.swiglu_backward_input(dy, h)
    return {
        "y": ops.swiglu_forward(h),
        "y again": again,
        "dgate": dh[..., 0, :],
        "dup": dh[..., 1, :],
    }


def swiglu_theirs(torch, case):
    g, up, dy = case.leaves(torch, "x up dy")
    y = torch.nn.functional.silu(g) * up
    dgate, dup = torch.autograd.grad(y, (g, up), dy)
    return {"y": y, "y again": y, "dgate": dgate, "dup": dup}


# Norms.


def norm_cases(rng):
    sizes = {
        "": (3, 96),
        " short": (5, 3),
        " long": (2, 8192),
        " alone": (3, 1),
        " many": (4096, 2),
    }
    return {
        name + kind: Case(
            x=x, dy=spread(rng, *size), w=spread(rng, size[1]), b=spread(rng, size[1])
        )
        for kind, size in sizes.items()
        for name, x in rows_of(rng, *size).items()
    }


def norms_exact(case):
    x, dy, w, b = case.wide("x dy w b")
    results = {}
    for name, mean in (("layernorm", x.mean(-1, keepdims=True)), ("rmsnorm", WIDE(0))):
        c = x - mean
        rstd = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + WIDE(np.float32(1e-5)))
        xhat, g = c * rstd, dy * w
        dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdims=True))
        if name == "layernorm":
            dx -= rstd * g.mean(-1, keepdims=True)
        y = xhat * w + (b if name == "layernorm" else 0)
        results |= {
            f"{name} y": (y, np.abs(xhat * w) + np.abs(b)),
            f"{name} dx": (dx, rstd * g),
            f"{name} dw": ((dy * xhat).sum(0), np.abs(dy).sum(0)),
        }
    return results | {"layernorm db": (dy.sum(0), np.abs(dy).sum(0))}


def norms_ours(ops, case):
    x, dy, w, b = case.on(ops, "x dy w b")
    dw, db, rms_dw = (ops.zeros(case.w.shape, ops.accum_dtype) for _ in range(3))
    y, mean, rstd = ops.layernorm_forward(x, w, b, 1e-5)
    ops.layernorm_backward_weight(dy, x, mean, rstd, dw, db)
    rms_y, rms_rstd = ops.rmsnorm_forward(x, w, 1e-5)
    ops.rmsnorm_backward_weight(dy, x, rms_rstd, rms_dw)
    return {
        "layernorm y": y,
        "layernorm dx": ops.layernorm_backward_input(dy, x, w, mean, rstd),
        "layernorm dw": dw,
        "layernorm db": db,
        "rmsnorm y": rms_y,
        "rmsnorm dx": ops.rmsnorm_backward_input(dy, x, w, rms_rstd),
        "rmsnorm dw": rms_dw,
    }


def norms_theirs(torch, case):
    x, dy, w, b = case.leaves(torch, "x dy w b")
    results, functional = {}, torch.nn.functional
    for name, y, leaves in (
        ("layernorm", functional.layer_norm(x, w.shape, w, b, 1e-5), (x, w, b)),
        ("rmsnorm", functional.rms_norm(x, w.shape, w, 1e-5), (x, w)),
    ):
        grads = torch.autograd.grad(y, leaves, dy)
        results |= {f"{name} y": y} | {
            f"{name} {of}": grad for of, grad in zip(("dx", "dw", "db"), grads, strict=False)
        }
    return results


# Cross-entropy over shards of the vocabulary.


def loss_cases(rng):
    cases = {}
    for kind, (count, width, valid) in {
        "": (4, 12, 12),
        " padded": (4, 12, 5),
        " one": (2, 1, 1),
        " long": (2, 20_000, 19_990),
    }.items():
        rows = rows_of(rng, count, width)
        rows |= {
            f"below {-low:g}": -low - np.abs(spread(rng, count, width, magnitude=low / 1e7))
            for low in (1e4, 1e13, 1e18, 1e31, 3e38)
        }
        for name, numbers in rows.items():
            logits = float32(numbers)
            logits[:, valid:] = np.nan  # padding is not read
            targets = rng.integers(0, valid, count)
            targets[0] = np.argmax(logits[0, :valid])
            for shards in (1, 4) if width % 4 == 0 else (1,):
                cases[f"{name}{kind} in {shards}"] = Case(
                    logits=logits, targets=targets, valid=valid, shards=shards
                )
    return cases


def loss_exact(case):
    x = case.logits[:, : case.valid].astype(WIDE)
    rest = x - x.max(1, keepdims=True)
    total = np.exp(rest).sum(1, keepdims=True)
    here = np.arange(case.valid) == case.targets[:, None]
    loss = np.log(total[:, 0]) - rest[here]
    dlogits = np.zeros(case.logits.shape, WIDE)
    dlogits[:, : case.valid] = (np.exp(rest) / total - here) * WIDE(0.25)
    return {"loss": (loss[:, None], 1.0), "dlogits": (dlogits, 0.25)}


def loss_ours(ops, case):
    logits, targets = case.on(ops, "logits targets")
    width = logits.shape[1] // case.shards
    starts = range(0, logits.shape[1], width)
    parts = [logits[:, start : start + width].copy() for start in starts]
    stats = ops.empty((case.shards, len(logits), 3), ops.accum_dtype)
    for place, (part, start) in enumerate(zip(parts, starts, strict=True)):
        ops.copy(stats[place], ops.cross_entropy_forward(part, targets, start, case.valid))
    loss, sums = ops.cross_entropy_combine(stats)
    grads = [
        ops.cross_entropy_backward_input(part, targets, sums, start, case.valid, 0.25)
        for part, start in zip(parts, starts, strict=True)
    ]
    return {
        "loss": loss[:, None],
        "dlogits": np.concatenate([ops.to_host(grad) for grad in grads], axis=1),
    }


def loss_theirs(torch, case):
    (logits,) = case.leaves(torch, "logits")
    loss = torch.nn.functional.cross_entropy(
        logits[:, : case.valid], torch.tensor(case.targets), reduction="none"
    )
    (grad,) = torch.autograd.grad(loss, logits, torch.full_like(loss, 0.25))
    return {"loss": loss[:, None], "dlogits": grad}


# Products, sums, rotations and updates.


OUT, PARTS = 5, 16  # columns of a product; parts that ranks have made
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def sum_cases(rng):
    cases = {}
    for kind, (rows, width) in {"": (6, 8), " many": (4096, 4), " long": (2, 3000)}.items():
        for name, x in rows_of(rng, rows, width).items():
            cases[name + kind] = Case(
                x=x,
                w=spread(rng, width, OUT),
                dy=spread(rng, rows, OUT),
                ids=rng.integers(0, 3, rows),
                angles=spread(rng, rows, 2, width // 2),
            )
    return cases


def _turned(x, angles):
    """The two halves of each row, turned."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = angles[:, 0], angles[:, 1]
    return first * cos, second * sin, second * cos, first * sin


def sums_exact(case):
    x, w, dy, angles = case.wide("x w dy angles")
    size, ids = np.abs(x), np.eye(3)[case.ids]
    first, second, third, fourth = _turned(x, angles)
    sums, sizes = x.sum(0), size.sum(0)
    return {
        "matmul": (x @ w, size @ np.abs(w)),
        "matmul_nt": (x @ w, size @ np.abs(w)),
        "matmul_tn_add": (x.T @ dy, size.T @ np.abs(dy)),
        "bias": (sums, sizes),
        "embedding": (ids.T @ x, ids.T @ size),
        "position": (ids.T @ x, ids.T @ size),
        "add_parts": (x[:PARTS].sum(0), size[:PARTS].sum(0)),
        "mean": (x.mean(0), size.mean(0)),
        "sum": (x.sum()[None], size.sum()),
        "square_sum": (x * x).sum()[None],
        "rope": (
            np.concatenate([first - second, third + fourth], -1),
            np.abs(np.concatenate([first, third], -1))
            + np.abs(np.concatenate([second, fourth], -1)),
        ),
    }


def sums_ours(ops, case):
    x, w, dy, ids, parts, turned = case.on(ops, "x w dy ids x x")
    dw, db = ops.zeros(case.w.shape, ops.accum_dtype), ops.zeros(case.x.shape[1:], ops.accum_dtype)
    dtable, dplaces = (ops.zeros((3, case.x.shape[1]), ops.accum_dtype) for _ in range(2))
    ops.matmul_tn_add(x, dy, dw)
    ops.bias_backward_weight(x, db)
    ops.embedding_backward_weight(ids, x, dtable, 0)
    ops.position_backward_weight(ids, x[None], dplaces)
    table = ops.asarray(case.angles)
    ops.rope_forward(turned[None, :, None], ops.asarray(np.arange(len(case.x))), table)
    return {
        "matmul": ops.matmul(x, w),
        "matmul_nt": ops.matmul_nt(x, w.T.copy()),
        "matmul_tn_add": dw,
        "bias": db,
        "embedding": dtable,
        "position": dplaces,
        "add_parts": ops.add_parts(parts[:PARTS]),
        "sum": np.array(ops.to_floats([ops.sum(x)])),
        "square_sum": np.array(ops.to_floats([ops.square_sum(x)])),
        "rope": turned,
    }


def sums_theirs(torch, case):
    x, w, dy = case.leaves(torch, "x w dy")
    (angles,), ids = case.leaves(torch, "angles"), torch.tensor(case.ids)
    table = torch.zeros(3, x.shape[1], dtype=x.dtype, requires_grad=True)
    (dtable,) = torch.autograd.grad(torch.nn.functional.embedding(ids, table), table, x)
    first, second = x.chunk(2, -1)
    turned = torch.cat([angles[:, 0], angles[:, 0]], -1) * x + torch.cat(
        [angles[:, 1], angles[:, 1]], -1
    ) * torch.cat([-second, first], -1)
    return {
        "matmul": x @ w,
        "matmul_nt": x @ w,
        "matmul_tn_add": x.T @ dy,
        "bias": x.sum(0),
        "embedding": dtable,
        "position": dtable,
        "add_parts": x[:PARTS].sum(0),
        "mean": x.mean(0),
        "sum": x.sum()[None],
        "square_sum": (x * x).sum()[None],
        "rope": turned,
    }


# Updates.


def update_cases(rng):
    return {
        name: Case(grad=grad.reshape(-1), data=spread(rng, grad.size))
        for name, grad in rows_of(rng, 1, 700).items()
    }


def updates_exact(case):
    data, grad = case.wide("data grad")
    lr, beta1, beta2, eps, decay = (WIDE(value) for value in ADAMW.values())
    m, v = (1 - beta1) * grad, (1 - beta2) * grad * grad
    step = lr * (m / (1 - beta1)) / (np.sqrt(v / (1 - beta2)) + eps)
    return {
        "sgd": (data - lr * grad, np.abs(data) + np.abs(lr * grad)),
        "m": m,
        "v": v,
        "adamw": (data * (1 - lr * decay) - step, np.abs(data) + np.abs(step)),
    }


def updates_ours(ops, case):
    plain, data, grad, again = case.on(ops, "data data grad data")
    m, v = (ops.zeros(case.grad.shape) for _ in range(2))
    by = AdamWStep(**ADAMW, step=1)
    ops.sgd_step(plain, grad, by.lr)
    ops.adamw_step(data, grad, m, v, by)
    results = {"sgd": plain, "adamw": data, "m": m, "v": v}
    moments = [ops.zeros(case.grad.shape) for _ in range(2)]
    ops.adamw_runs(again, grad, *moments, [(True, slice(0, data.size))], by)
    for name, x in zip(("adamw", "m", "v"), (again, *moments), strict=True):
        results[f"{name} of runs"] = x
    return results


def updates_theirs(torch, case):
    results = {}
    for name, make in (
        ("sgd", lambda data: torch.optim.SGD([data], lr=ADAMW["lr"])),
        (
            "adamw",
            lambda data: torch.optim.AdamW(
                [data],
                lr=ADAMW["lr"],
                betas=(ADAMW["beta1"], ADAMW["beta2"]),
                eps=ADAMW["eps"],
                weight_decay=ADAMW["weight_decay"],
            ),
        ),
    ):
        data, grad = (one.detach() for one in case.leaves(torch, "data grad"))
        data = torch.nn.Parameter(data)
        data.grad = grad
        optimizer = make(data)
        optimizer.step()
        results[name] = data
    state = optimizer.state[data]
    return results | {"m": state["exp_avg"], "v": state["exp_avg_sq"]}


FAMILIES = {
    "gelu": Family(elementwise_cases, gelu_exact, gelu_ours, gelu_theirs, axis=()),
    "swiglu": Family(elementwise_cases, swiglu_exact, swiglu_ours, swiglu_theirs, axis=()),
    "norms": Family(norm_cases, norms_exact, norms_ours, norms_theirs),
    "loss": Family(loss_cases, loss_exact, loss_ours, loss_theirs),
    "sums": Family(sum_cases, sums_exact, sums_ours, sums_theirs),
    "updates": Family(update_cases, updates_exact, updates_ours, updates_theirs, axis=()),
}
