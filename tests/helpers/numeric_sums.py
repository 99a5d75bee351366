"""Hostile inputs of products, sums, rotations and updates: see numeric_cases.py."""

import numpy as np
from numeric_cases import WIDE, Case, Family, rows_of, spread

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
    ops.sgd_step(plain, grad, ADAMW["lr"])
    ops.adamw_step(data, grad, m, v, **ADAMW, step=1)
    results = {"sgd": plain, "adamw": data, "m": m, "v": v}
    moments = [ops.zeros(case.grad.shape) for _ in range(2)]
    ops.adamw_runs(again, grad, *moments, [(True, slice(0, data.size))], **ADAMW, step=1)
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


SUMS = Family(sum_cases, sums_exact, sums_ours, sums_theirs)
UPDATES = Family(update_cases, updates_exact, updates_ours, updates_theirs, axis=())
