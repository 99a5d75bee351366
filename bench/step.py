"""Time one training step of mpipar's decoder beside the same model in PyTorch eager, in one run.

    python -m bench.step --threads 1

PyTorch computes attention explicitly (product, mask, softmax, product), as mpipar does. Both start
from the same weights, and both must give the same losses over three updates before anything is
timed. Repetitions of the two alternate, so that a slow spell of the machine hits both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.torch_decoder import TorchDecoder
from mpipar.config import Config, GridConfig, ModelConfig, RunConfig, TrainConfig, resolve
from mpipar.data.rows import Batch
from mpipar.errors import EXIT_CHECK_FAILED, EnvironmentProblem
from mpipar.grid import Grid
from mpipar.ops import make
from mpipar.optim import learning_rate
from mpipar.trace import Recorder
from mpipar.train import Worker

PARTS = ("forward_backward", "update")
CHECK_STEPS, WARM_UP_STEPS, TOLERANCE = 3, 2, 1e-5


class OurSide:
    """mpipar's own step: `gradients`, then clipping and AdamW."""

    def __init__(self, config, batch):
        self.config, self.batch = config, batch
        self.worker = Worker(config, Grid.of(config.grid, 0), make("cpu", "float32"), Recorder())
        self.worker.initialize()

    def weights(self):
        """Name -> array of every parameter."""
        stages = self.worker.stages.values()
        return {param.name: param.data for stage in stages for param in stage.flat.params}

    def forward_backward(self, step):
        """Return the loss; keeps the gradient norm for `update`."""
        loss, self.norm, _ = self.worker.gradients(step, lambda mb: self.batch)
        return loss

    def update(self, step):
        """Clip and apply the gradients."""
        self.worker.gradsync.clip(self.norm, self.config.train.clip)
        self.worker.optimizer.step(learning_rate(self.config.train, step), step)


def parse(argv):
    """Sizes of the model and of the measurement."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    for name, default, text in (
        ("layers", 6, "transformer blocks"),
        ("d-model", 384, "model width"),
        ("heads", 6, "attention heads"),
        ("seq-len", 256, "tokens per row"),
        ("batch-size", 4, "rows per step"),
        ("vocab-size", 256, "tokens in the vocabulary"),
        ("threads", 1, "threads of the products, for both"),
        ("repeats", 20, "timed steps"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--json", help="write the result to this file")
    return parser.parse_args(argv)


def setup(args, torch):
    """Both sides, on one random batch and from equal weights."""
    model = ModelConfig(
        layers=args.layers,
        d_model=args.d_model,
        heads=args.heads,
        seq_len=args.seq_len,
        vocab_size=args.vocab_size,
    )
    config, _ = resolve(
        Config(
            model,
            GridConfig(num_microbatches=1),
            TrainConfig(batch_size=args.batch_size, warmup_steps=0),
            RunConfig(),
        ),
        1,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, args.vocab_size, (args.batch_size, args.seq_len + 1))
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(args.seq_len))
    ours = OurSide(config, batch)
    return ours, TorchDecoder(torch, config, batch, ours.weights())


def disagreement(ours, theirs):
    """What differs between the losses of a few full updates, or None.

    The second loss is right only if every gradient and the update were.
    """
    for step in range(1, CHECK_STEPS + 1):
        a, b = ours.forward_backward(step), theirs.forward_backward(step)
        if not abs(a - b) <= TOLERANCE * abs(b):
            return f"step {step}: loss {a!r} here, {b!r} in PyTorch"
        ours.update(step)
        theirs.update(step)
    return None


def measure(sides, repeats):
    """(side, part) -> seconds of each repetition; the sides take turns."""
    seconds = {(name, part): [] for name in sides for part in PARTS}
    first = CHECK_STEPS + 1
    for step in range(first, first + WARM_UP_STEPS + repeats):
        for name, side in sides.items():
            for part in PARTS:
                start = time.perf_counter()
                getattr(side, part)(step)
                if step >= first + WARM_UP_STEPS:
                    seconds[name, part].append(time.perf_counter() - start)
    for name in sides:
        pairs = zip(*(seconds[name, part] for part in PARTS), strict=True)
        seconds[name, "step"] = [sum(pair) for pair in pairs]
    return seconds


def table(seconds):
    """The lines of the result: medians, best values, and the ratio of each."""
    head = f"{'part':<18}{'mpipar_ms':>11}{'torch_ms':>10}{'ratio':>7}"
    lines = [head + f"{'mpipar_best_ms':>16}{'torch_best_ms':>15}{'ratio':>7}"]
    for part in (*PARTS, "step"):
        a, b = seconds["mpipar", part], seconds["torch", part]
        line = f"{part:<18}"
        for pick, widths in ((statistics.median, (11, 10)), (min, (16, 15))):
            line += f"{pick(a) * 1e3:>{widths[0]}.2f}{pick(b) * 1e3:>{widths[1]}.2f}"
            line += f"{pick(a) / pick(b):>7.2f}"
        lines.append(line)
    return lines


def rows(seconds):
    """The result as rows: medians, best values, and their ratios."""
    found = []
    for part in (*PARTS, "step"):
        a, b = seconds["mpipar", part], seconds["torch", part]
        found.append({
            "part": part, "mpipar_ms": statistics.median(a) * 1e3,
            "torch_ms": statistics.median(b) * 1e3,
            "ratio_of_medians": statistics.median(a) / statistics.median(b),
            "ratio_of_best": min(a) / min(b),
        })
    return found


def main(argv=None):
    """Check, measure, print; returns the exit code."""
    args = parse(argv)
    try:
        import torch
    except ImportError:
        error = EnvironmentProblem("bench.step compares with PyTorch: pip install '.[peers]'")
        print(error, file=sys.stderr)
        return error.exit_code
    torch.set_num_threads(args.threads)
    with threadpool_limits(args.threads):
        ours, theirs = setup(args, torch)
        problem = disagreement(ours, theirs)
        if problem:
            print(f"not timed, the two models differ: {problem}", file=sys.stderr)
            return EXIT_CHECK_FAILED
        seconds = measure({"mpipar": ours, "torch": theirs}, args.repeats)
    print(
        f"{args.layers} layers, D {args.d_model}, {args.heads} heads, batch {args.batch_size} x "
        f"{args.seq_len} tokens, V {args.vocab_size}, float32, {args.threads} thread(s), numpy "
        f"{np.__version__}, torch {torch.__version__}, {args.repeats} steps, losses equal"
    )
    print("\n".join(table(seconds)))
    if args.json:
        sizes = {key: value for key, value in vars(args).items() if key != "json"}
        results.write(args.json, "bench.step", rows(seconds), torch=torch.__version__, **sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
