"""The whole idea in one file: a decoder trained over dp x pp x tp ranks, every send written out.

    mpiexec -n 4 python docs/examples/one_file.py                  # pp 2 x tp 2
    mpiexec -n 4 python docs/examples/one_file.py --layout 2,1,2   # dp 2 x tp 2

Each layer returns y and a function that computes dx from dy; comments name the matching file of
mpipar. On every layout the losses equal those of `mpipar train` with the same weights and rows:

    mpipar train --steps 1 --out a
    mpipar train --init-from a/weights --out b --steps 9 --lr 1e-3 --lr-schedule constant --clip 0
    python docs/examples/one_file.py --weights a/weights/model.safetensors --compare b

Letters: B rows, T tokens of a row, L blocks, D width, H heads, F width of the FFN, V vocabulary.
"""

import argparse
import json
import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: the ranks share the cores

import numpy as np
from mpi4py import MPI

L, D, H, T, V, F, EPS = 4, 128, 4, 64, 256, 512, 1e-5
ROWS, MICROBATCHES = 16, 4  # of a step over all ranks, and of a pipeline
LR, WARM_UP, BETA1, BETA2, ADAM_EPS, DECAY = 1e-3, 60, 0.9, 0.95, 1e-8, 0.1
WORLD, WAITED = MPI.COMM_WORLD, {}  # name of a barrier: [calls, bytes, seconds]
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # mpipar/comm/launcher.py
if WORLD.size == 1 and any(os.environ.get(name, "1") != "1" for name in SIZES):
    raise SystemExit("MPI does not know the other ranks of this launcher: see `mpipar doctor`")


def timed(name, call, x, *more):  # mpipar/comm/recorder.py
    """Run an MPI call that fills x, and count it under its name; return x."""
    begin, entry = time.perf_counter(), WAITED.setdefault(name, [0, 0, 0.0])
    call(*more)
    entry[:] = entry[0] + 1, entry[1] + x.nbytes, entry[2] + time.perf_counter() - begin
    return x


def all_reduce(comm, x, name, op=MPI.SUM):  # mpipar/comm/group.py
    """Sum x over the ranks of comm, in place. A group of one has nothing to wait for."""
    return x if comm.size == 1 else timed(name, comm.Allreduce, x, MPI.IN_PLACE, x, op)


class Grid:  # mpipar/comm/grid.py
    """This rank's place on each axis, and its groups; tp is innermost."""

    def __init__(self, dp, pp, tp):
        if dp * pp * tp != WORLD.size or pp > L or H % tp or ROWS // MICROBATCHES % dp:
            raise SystemExit(
                f"--layout {dp},{pp},{tp}: the product must be {WORLD.size}, pp at"
                f" most {L}, tp a divisor of {H}, dp of {ROWS // MICROBATCHES}"
            )
        self.p, self.d, self.t = np.unravel_index(WORLD.rank, (pp, dp, tp))
        self.dp = WORLD.Split(self.p * tp + self.t)
        self.pp = WORLD.Split(self.d * tp + self.t)
        self.tp = WORLD.Split(self.p * dp + self.d)
        self.is_first, self.is_last = self.p == 0, self.p == pp - 1
        self.ends = self.pp.Split(int(self.is_first or self.is_last))  # both have the token table


def shapes(grid, blocks):  # mpipar/models/decoder.py, mpipar/run/checkpoint/families.py
    """Return (GPT-2's name, shape, axis that tp cuts or None) of the tensors of a stage."""
    if grid.is_first or grid.is_last:
        yield "wte.weight", (V, D), 0
    if grid.is_first:
        yield "wpe.weight", (T, D), None
    layers = [
        (f"h.{i}.{name}", *more)
        for i in blocks
        for name, *more in (
            ("ln_1", (D,), None),
            ("attn.c_attn", (D, 3, D), 2),
            ("attn.c_proj", (D, D), 0),
            ("ln_2", (D,), None),
            ("mlp.c_fc", (D, F), 1),
            ("mlp.c_proj", (F, D), 0),
        )
    ]
    for name, shape, axis in layers + [("ln_f", (D,), None)] * int(grid.is_last):
        yield f"{name}.weight", shape, axis
        yield f"{name}.bias", shape[1:] or shape, axis - 1 if axis else None


def initial(name, shape):  # mpipar/layers/param.py
    """Return the whole tensor, identical on every rank: norms 1, biases 0, all else is normal."""
    if "ln_" in name or name.endswith("bias"):
        return np.full(shape, float(name.endswith("weight")))
    return np.random.default_rng(list(name.encode())).normal(0, 0.02, shape)


def gelu(x):  # mpipar/ops/array_ops.py
    """GELU with the tanh approximation, as in GPT-2."""
    c, t = np.sqrt(2 / np.pi), np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t + x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x))
    return 0.5 * x * (1 + t), lambda dy: dy * slope


def attention(qkv):  # mpipar/layers/attention.py
    """Causal attention of q, k and v, together (B, T, 3 * heads * d); y (B, T, heads * d)."""
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, -1, D // H).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(D // H)
    scores[..., np.triu(np.ones((T, T), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def backward(dy):
        dy = dy.reshape(*dy.shape[:2], -1, D // H).swapaxes(1, 2)
        dp = dy @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(D // H)
        dqkv = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dy])
        return dqkv.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    return (p @ v).swapaxes(1, 2).reshape(*qkv.shape[:2], -1), backward


class Stage:  # mpipar/models/stage.py
    """Some blocks, all their shards in one buffer. The end stages have embedding and head."""

    def __init__(self, grid, path):
        self.grid, self.saved = grid, {}
        self.shape = ROWS // grid.dp.size // MICROBATCHES, T, D
        self.blocks = range(L * grid.p // grid.pp.size, L * (grid.p + 1) // grid.pp.size)
        found, parts = {}, {}
        if path:  # what one rank gets of a file: mpipar/run/checkpoint/weights.py
            from safetensors.numpy import load_file

            found = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
        for name, shape, axis in shapes(grid, self.blocks):
            x = found[name].reshape(shape) if path else initial(name, shape)
            x = x if axis is None else np.split(x, grid.tp.size, axis)[grid.t]
            is_matrix = len(shape) > 1 and name.endswith("weight")
            parts[name] = x.reshape(len(x), -1) if is_matrix else x.ravel()
        self.flat = np.concatenate([x.ravel() for x in parts.values()]).astype(np.float64)
        self.grad, self.m, self.v, self.decay = np.zeros((4, self.flat.size))
        self.w, self.g, end = {}, {}, 0
        for name, x in parts.items():
            run = slice(end, end := end + x.size)
            self.w[name], self.g[name] = (
                flat[run].reshape(x.shape) for flat in (self.flat, self.grad)
            )
            self.decay[run] = DECAY * (x.ndim > 1)

    def norm(self, x, name):  # mpipar/layers/norm.py
        """LayerNorm of each token."""
        centred = x - x.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS)
        unit, w, dw = centred * rstd, self.w[f"{name}.weight"], self.g[f"{name}.weight"]

        def backward(dy):
            dw[:] += (dy * unit).sum((0, 1))
            self.g[f"{name}.bias"] += dy.sum((0, 1))
            dunit = dy * w
            along = (dunit * unit).mean(-1, keepdims=True)
            return rstd * (dunit - dunit.mean(-1, keepdims=True) - unit * along)

        return unit * w + self.w[f"{name}.bias"], backward

    def product(self, x, name):  # mpipar/layers/parallel/linear.py
        """x w; its bias is added after the sum over tp."""
        w = self.w[f"{name}.weight"]

        def backward(dy):
            rows = dy.reshape(-1, dy.shape[-1])
            self.g[f"{name}.weight"] += x.reshape(-1, x.shape[-1]).T @ rows
            self.g[f"{name}.bias"] += rows.sum(0)
            return dy @ w.T

        return x @ w, backward

    def branch(self, x, name, norm, first, inside, second):  # mpipar/layers/parallel/row.py
        """x + second(inside(first(norm(x)))): one half of a block, cut over tp.

        The first product is cut by columns and the second by rows, so there is one sum after them
        in the forward pass, and one before the norm in the backward pass.
        """
        a, norm_backward = self.norm(x, f"{name}.{norm}")
        b, first_backward = self.product(a, f"{name}.{first}")
        c, inside_backward = inside(b + self.w[f"{name}.{first}.bias"])
        y, second_backward = self.product(c, f"{name}.{second}")
        y = all_reduce(self.grid.tp, y, f"{name}.{second} F")

        def backward(dy):
            da = first_backward(inside_backward(second_backward(dy)))
            return dy + norm_backward(all_reduce(self.grid.tp, da, f"{name}.{first} B"))

        return x + y + self.w[f"{name}.{second}.bias"], backward

    def own(self, ids):  # mpipar/layers/embedding.py
        """Return which ids have their row of the token table on this rank, and their rows."""
        num_rows = len(self.w["wte.weight"])
        own = ids // num_rows == self.grid.t
        return own, ids[own] % num_rows

    def embedding(self, _, ids):
        """Return the sum over tp of the rows that each rank has."""
        (own, places), x = self.own(ids), np.zeros(self.shape)
        x[own] = self.w["wte.weight"][places]

        def backward(dy):
            np.add.at(self.g["wte.weight"], places, dy[own])
            self.g["wpe.weight"] += dy.sum(0)

        return all_reduce(self.grid.tp, x, "embedding F") + self.w["wpe.weight"], backward

    def loss(self, x, ids):  # mpipar/layers/loss.py
        """Return the sum of -log softmax over a cut vocabulary; its gradient is the step mean's."""
        table, (own, places) = self.w["wte.weight"], self.own(ids)
        logits = x @ table.T
        largest = all_reduce(self.grid.tp, logits.max(-1), "loss max", MPI.MAX)
        p = np.exp(logits - largest[..., None])
        sums = np.stack([p.sum(-1), np.zeros_like(largest)])
        sums[1, own] = logits[own, places]
        total, target = all_reduce(self.grid.tp, sums, "loss sums")

        def backward(_):
            dlogits = p / (total[..., None] * ROWS * T)
            dlogits[own, places] -= 1 / (ROWS * T)
            self.g["wte.weight"] += dlogits.reshape(-1, len(table)).T @ x.reshape(-1, D)
            return all_reduce(self.grid.tp, dlogits @ table, "head B")

        return (np.log(total) + largest - target).sum(), backward

    def forward(self, mb, x, rows):  # mpipar/models/stage.py
        """Run rows (B, T + 1) of tokens; return activations for the next stage, or the loss."""
        parts = [(self.embedding, rows[:, :-1])] if self.grid.is_first else []
        for i in self.blocks:
            parts += [
                (self.branch, f"h.{i}", "ln_1", "attn.c_attn", attention, "attn.c_proj"),
                (self.branch, f"h.{i}", "ln_2", "mlp.c_fc", gelu, "mlp.c_proj"),
            ]
        parts += [(self.norm, "ln_f"), (self.loss, rows[:, 1:])] if self.grid.is_last else []
        self.saved[mb] = []
        for part, *more in parts:
            x, backward = part(x, *more)
            self.saved[mb].append(backward)
        return x

    def adamw(self, step):  # mpipar/train/optim.py
        """Update the shards. Source: arXiv 1711.05101."""
        self.m += (1 - BETA1) * (self.grad - self.m)
        self.v += (1 - BETA2) * (self.grad * self.grad - self.v)
        change = self.m / (1 - BETA1**step) / (np.sqrt(self.v / (1 - BETA2**step)) + ADAM_EPS)
        self.flat -= LR * min(1, step / WARM_UP) * (change + self.decay * self.flat)
        self.grad[:] = 0


def step(stage, grid, batch):  # mpipar/pipeline/engine.py
    """1F1B: warm-up, one forward and one backward in turn, drain; return the sum of losses.

    Neighbours send to each other at once, so sends do not block. A request keeps its array.
    """
    sent, losses, count = [], [], MICROBATCHES

    def receive(source, mb):
        x = np.empty(stage.shape)
        return timed(f"from stage {source}", grid.pp.Recv, x, x, source, mb)

    def forward(mb):
        y = stage.forward(mb, None if grid.is_first else receive(grid.p - 1, mb), batch[mb])
        if grid.is_last:
            losses.append(y)
        else:
            sent.append(grid.pp.Isend(y, grid.p + 1, mb))

    def backward(mb):
        dx = None if grid.is_last else receive(grid.p + 1, mb)
        for part in stage.saved.pop(mb)[::-1]:
            dx = part(dx)
        if not grid.is_first:
            sent.append(grid.pp.Isend(dx, grid.p - 1, mb))

    warm_up = min(count, grid.pp.size - 1 - grid.p)
    for mb in range(warm_up):
        forward(mb)
    for mb in range(warm_up, count):
        forward(mb)
        backward(mb - warm_up)
    for mb in range(count - warm_up, count):
        backward(mb)
    MPI.Request.Waitall(sent)
    if grid.pp.size > 1 and (grid.is_first or grid.is_last):
        all_reduce(grid.ends, stage.g["wte.weight"], "tied table")
    all_reduce(grid.dp, stage.grad, "gradients")  # mpipar/train/gradsync.py
    return sum(losses)


def batch_of(tokens, number, grid):  # mpipar/run/data/rows.py
    """Return this rank's microbatches: row i of a step is the same on any layout."""
    philox = (np.random.Philox(key=0, counter=[0, row, number, 0]) for row in range(ROWS))
    begins = [np.random.Generator(one).integers(len(tokens) - T) for one in philox]
    rows = np.array([tokens[begin : begin + T + 1] for begin in begins], np.int64)
    return rows.reshape(MICROBATCHES, grid.dp.size, -1, T + 1)[:, grid.d]


def train(layout, steps, path=None, theirs=()):  # mpipar/run/training.py
    """Train on Python's own documentation; print losses, beside `theirs` where they are given."""
    from pydoc_data.topics import topics

    tokens = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    grid, losses = Grid(*layout), []
    stage = Stage(grid, path)
    for number in range(1, steps + 1):
        loss = step(stage, grid, batch_of(tokens[: -(len(tokens) // 10)], number, grid))
        total = all_reduce(WORLD, np.array(loss * float(grid.t == 0)), "loss")
        losses.append(float(total) / (ROWS * T))
        stage.adamw(number)
        if WORLD.rank == 0 and theirs:
            print(f"step {number:4}  loss {losses[-1]:.13f}  mpipar {theirs[number - 1]:.13f}")
        elif WORLD.rank == 0 and (number == 1 or number % 10 == 0):
            print(f"step {number:4}  loss {losses[-1]:.4f}", flush=True)
    for name, (calls, num_bytes, seconds) in WAITED.items() if WORLD.rank == 0 else ():
        print(f"{name:17} {calls:6} calls {num_bytes / 1e6:9.2f} MB {seconds:7.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--layout",
        metavar="DP,PP,TP",
        default={1: "1,1,1", 2: "1,2,1", 4: "1,2,2", 8: "2,2,2"}.get(
            WORLD.size, f"{WORLD.size},1,1"
        ),
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--weights", help="a safetensors file with GPT-2's names")
    parser.add_argument("--compare", metavar="RUN", help="a run of `mpipar train` from --weights")
    args, theirs = parser.parse_args(), ()
    if args.compare:
        with open(os.path.join(args.compare, "metrics.jsonl")) as file:
            theirs = [json.loads(line)["loss"] for line in file]
    steps = len(theirs) or args.steps
    train(map(int, args.layout.split(",")), steps, args.weights, theirs)
