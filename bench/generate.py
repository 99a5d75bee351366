"""Times text generation on one rank, compared with transformers.

    python -m bench.generate

The weights are random, and the same for every side. All sides take the likeliest token, so that
each text has --new-tokens. Before anything is timed, transformers reads mpipar's texts: no other
token may be likelier, except by rounding. Repetitions of all sides alternate.

tokens_per_s counts the new tokens of all rows over the whole time, prompts included.
over_transformers: tokens_per_s over that of transformers. All figures are medians over the
repetitions.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.program import Outcome, Program, count
from bench.training import worker_of
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.errors import EXIT_CHECK_FAILED, UserError
from mpipar.ops import make
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.generation import Sampling, Text, generate
from mpipar.run.process.mpi import OneRank

TOLERANCE = 1e-4  # of the largest logit: how much likelier another token may be


def add_flags(parser) -> None:
    """Add the flags for the models and what they generate."""
    parser.add_argument(
        "--presets",
        nargs="+",
        default=["llama-15m", "llama-110m"],
        choices=sorted(PRESETS),
        help="models (llama-15m llama-110m)",
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=count,
        default=[1, 8],
        help="prompts at one time (1 8)",
    )


class WrongTextError(UserError):
    """A text has a token that is not the likeliest, so nothing is timed."""

    exit_code = EXIT_CHECK_FAILED


class OurSide:
    """mpipar's own generation."""

    def __init__(self, preset, kernels="numpy"):
        self.config, _ = resolve(build({"preset": preset, "optimizer": "sgd"}), 1)
        ops = make("cpu", "float32", kernels=kernels)
        self.worker = worker_of(self.config, OneRank(), ops)

    def run(self, prompts, new_tokens) -> list[list[int]]:
        """Return all tokens of each row."""
        texts = [Text(number, list(prompt)) for number, prompt in enumerate(prompts)]
        for _ in generate(self.worker, texts, Sampling(new_tokens)):
            pass
        return [text.tokens for text in texts]


class TheirSide:
    """transformers' own generation from the same weights, which are passed through a file."""

    def __init__(self, ours, threads):
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch = torch
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(ours.worker, Path(folder))
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            ).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, prompts, new_tokens) -> list[list[int]]:
        """Return all tokens of each row."""
        ids = self.torch.tensor(prompts)
        found = self.model.generate(
            ids,
            attention_mask=self.torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return found.tolist()

    def disagreement(self, rows, first: int) -> float:
        """Return by how much another token was likelier than those of rows from position `first`.

        As a share of the largest logit of the text.
        """
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor(rows)[:, :-1]).logits[:, first - 1 :].numpy()
        chosen = np.take_along_axis(logits, np.array(rows)[:, first:, None], axis=2)
        return float((logits.max(axis=2) - chosen[..., 0]).max() / np.abs(logits).max())


def measure(sides, prompts, args) -> dict[str, float]:
    """Return {name of a side: median seconds of its repetitions but the first}."""
    found = {name: [] for name in sides}
    for _ in range(args.repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side.run(prompts, args.new_tokens)
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def rows_of(preset, args) -> list[dict]:
    """Return a row for each side and batch size of one model. Raises WrongTextError."""
    kernels = ["numpy", *["numba"] * bool(importlib.util.find_spec("numba"))]
    ours = {f"mpipar {one}": OurSide(preset, one) for one in kernels}
    first, theirs, made = ours["mpipar numpy"], {}, []
    if importlib.util.find_spec("transformers"):
        theirs["transformers"] = TheirSide(first, args.threads)
    for batch_size in args.batch_sizes:
        shape = batch_size, args.prompt_tokens
        vocabulary = first.config.model.vocab_size
        prompts = np.random.default_rng(0).integers(0, vocabulary, shape).tolist()
        for name, side in ours.items() if theirs else ():
            texts = side.run(prompts, args.new_tokens)
            wrong = theirs["transformers"].disagreement(texts, args.prompt_tokens)
            if not wrong <= TOLERANCE:
                raise WrongTextError(
                    f"not timed: {preset}, {name}: another token is likelier by {wrong:.1e}"
                )
        found = measure(ours | theirs, prompts, args)
        rows = [
            {
                "model": preset,
                "side": name,
                "batch_size": batch_size,
                "tokens_per_s": batch_size * args.new_tokens / seconds,
            }
            for name, seconds in found.items()
        ]
        if theirs:
            for one in rows:
                one["over_transformers"] = one["tokens_per_s"] / rows[-1]["tokens_per_s"]
        made += rows
    return made


def measure_all(args, session) -> Outcome:
    """Measure all models."""
    with threadpool_limits(args.threads):
        made = [row for preset in args.presets for row in rows_of(preset, args)]
    facts = {
        name: getattr(args, name) for name in ("threads", "prompt_tokens", "new_tokens", "repeats")
    }
    return Outcome(made, facts | results.versions("torch", "transformers", "numba"))


main = Program(
    "generate",
    __doc__,
    measure_all,
    add=add_flags,
    counts={
        "--prompt-tokens": (128, "tokens of each prompt"),
        "--new-tokens": (128, "tokens added to each prompt"),
        "--repeats": (5, "repetitions"),
        "--threads": (1, "threads"),
    },
).started(__name__)
