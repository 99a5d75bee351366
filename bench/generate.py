"""Times text generation: with and without a cache, over layouts, compared with transformers.

    python -m bench.generate                              # one rank beside transformers
    python -m bench.generate --contexts 64 256 1000       # with a cache and without it
    mpiexec -n 2 python -m bench.generate --presets llama-15m    # layouts of two ranks

The weights are random, and the same for every side. All sides take the likeliest token, so that
each text has --new-tokens. Before anything is timed, transformers reads mpipar's texts: no other
token may be likelier, except by rounding. Repetitions of all sides alternate.

tokens_per_s counts the new tokens of all rows over the whole time, prompts included. A row without
a cache is timed on single tokens, each of which runs the whole text through the model. first_ms:
until the first new token. next_ms: median time of each further round, which adds a token to every
row. over_transformers: tokens_per_s over that of transformers, its time per token over ours. All
figures are medians over the repetitions.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.program import Outcome, Program
from bench.training import worker_of
from mpipar.checkpoint import weights as checkpoint
from mpipar.config import flags
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.data.rows import Batch
from mpipar.errors import EXIT_CHECK_FAILED, UserError
from mpipar.inference.generate import Text, generate
from mpipar.inference.sampling import Sampling
from mpipar.ops import make

LAYOUTS = ("tp", "pp", "dp")
TOLERANCE = 1e-4  # of the largest logit: how much likelier another token may be
SINGLE_TOKENS = 3  # that are timed without a cache


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
        type=flags.count,
        default=[1, 8],
        help="prompts at one time (1 8)",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=flags.count,
        help="lengths of a text at which a token is timed with cache and without",
    )


class WrongTextError(UserError):
    """A text has a token that is not the likeliest, so nothing is timed."""

    exit_code = EXIT_CHECK_FAILED


class OurSide:
    """mpipar's generation on this rank. Comm: all ranks build it and call it together."""

    def __init__(self, preset, layout, world, kernels="numpy"):
        grid = dict.fromkeys(("dp", "pp", "tp"), 1) | layout
        self.config, _ = resolve(
            build(
                grid
                | {
                    "preset": preset,
                    "num_microbatches": grid["pp"],
                    "optimizer": "sgd",
                    "batch_size": grid["dp"] * grid["pp"],
                }
            ),
            world.size,
        )
        self.worker = worker_of(self.config, world, make("cpu", "float32", kernels=kernels))

    def run(self, prompts, new_tokens) -> tuple[list[float], list[list[int]]]:
        """Return (seconds of each round, all tokens of each row)."""
        texts = [Text(number, list(prompt)) for number, prompt in enumerate(prompts)]
        times = [time.perf_counter()]
        times += (time.perf_counter() for _ in generate(self.worker, texts, Sampling(new_tokens)))
        return np.diff(times).tolist(), [text.tokens for text in texts]

    def single(self, prompt) -> float:
        """Return the seconds of one token of one text without a cache."""
        batch = Batch(np.array([prompt]), None, np.arange(len(prompt)))
        start = time.perf_counter()
        self.worker.forward([0], lambda mb: batch)[0][-1].argmax()
        return time.perf_counter() - start


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

    def run(self, prompts, new_tokens) -> tuple[list[float], list[list[int]]]:
        """Return ([seconds of the whole], all tokens of each row)."""
        ids = self.torch.tensor(prompts)
        start = time.perf_counter()
        with self.torch.no_grad():
            found = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return [time.perf_counter() - start], found.tolist()

    def disagreement(self, rows, first: int) -> float:
        """Return by how much another token was likelier than those of rows from position `first`.

        As a share of the largest logit of the text.
        """
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor(rows)[:, :-1]).logits[:, first - 1 :].numpy()
        chosen = np.take_along_axis(logits, np.array(rows)[:, first:, None], axis=2)
        return float((logits.max(axis=2) - chosen[..., 0]).max() / np.abs(logits).max())


def random_prompts(config, count, length):
    """Return prompts of random tokens, the same on every rank."""
    rng = np.random.default_rng(0)
    return rng.integers(0, config.model.vocab_size, (count, length)).tolist()


def measure(preset, sides, prompts, args, world) -> dict[str, list[list[float]]]:
    """Return {name of a side: seconds of its rounds, for each repetition}, without the first one.

    Comm: a barrier before each, and the sides' own.
    """
    found = {name: [] for name in sides}
    for repetition in range(args.repeats + 1):
        if world.rank == 0:
            print(
                f"{preset}, batch {len(prompts)}: "
                f"{f'repetition {repetition} of {args.repeats}' if repetition else 'warm-up'}",
                file=sys.stderr,
                flush=True,
            )
        for name, side in sides.items():
            world.Barrier()
            found[name].append(side.run(prompts, args.new_tokens)[0])
    return {name: runs[1:] for name, runs in found.items()}


def rows(preset, found, batch_size, args) -> list[dict]:
    """Return the result of a model and a batch size as rows."""
    totals = {name: statistics.median(map(sum, runs)) for name, runs in found.items()}
    theirs = totals.get("transformers")
    made = []
    for name, runs in found.items():
        known = len(runs[0]) > 1
        row = {
            "model": preset,
            "side": name,
            "batch_size": batch_size,
            "first_ms": statistics.median(run[0] for run in runs) * 1e3 if known else "",
            "next_ms": statistics.median(second for run in runs for second in run[1:]) * 1e3
            if known
            else "",
            "tokens_per_s": batch_size * args.new_tokens / totals[name],
        }
        made.append(row | ({} if theirs is None else {"over_transformers": theirs / totals[name]}))
    return made


def our_sides(preset, world) -> dict[str, OurSide]:
    """Return one side per layout on several ranks, one per set of kernels on a single rank."""
    if world.size > 1:
        return {
            f"mpipar {axis} {world.size}": OurSide(preset, {axis: world.size}, world)
            for axis in LAYOUTS
        }
    return {
        f"mpipar {kernels}": OurSide(preset, {}, world, kernels)
        for kernels in ("numpy", "numba")
        if kernels == "numpy" or importlib.util.find_spec("numba")
    }


def over_sides(preset, args, world) -> list[dict]:
    """Return a row for each side and batch size of one model. Raises WrongTextError."""
    ours, theirs, made = our_sides(preset, world), {}, []
    first = next(iter(ours.values()))
    if world.size == 1 and importlib.util.find_spec("transformers"):
        theirs["transformers"] = TheirSide(first, args.threads)
    for batch_size in args.batch_sizes:
        prompts = random_prompts(first.config, batch_size, args.prompt_tokens)
        for name, side in ours.items() if theirs else ():
            wrong = theirs["transformers"].disagreement(
                side.run(prompts, args.new_tokens)[1], args.prompt_tokens
            )
            if not wrong <= TOLERANCE:
                raise WrongTextError(
                    f"not timed: {preset}, {name}: another token is likelier by {wrong:.1e}"
                )
        made += rows(preset, measure(preset, ours | theirs, prompts, args, world), batch_size, args)
    return made


def over_contexts(preset, args, world) -> list[dict]:
    """Return a row for each length of a text: one token with a cache and without."""
    side, made = OurSide(preset, {}, world), []
    for length in (one for one in args.contexts if one <= side.config.model.seq_len):
        prompt = random_prompts(side.config, 1, length)[0]
        few = SINGLE_TOKENS * args.repeats
        rounds, _ = side.run([prompt[: max(1, length - few)]], few)
        cached = statistics.median(rounds[1:])
        plain = statistics.median(side.single(prompt) for _ in range(SINGLE_TOKENS))
        made.append(
            {
                "model": preset,
                "context": length,
                "with_cache_tokens_per_s": 1 / cached,
                "without_tokens_per_s": 1 / plain,
                "times": plain / cached,
            }
        )
    return made


def measure_all(args, session) -> Outcome | int:
    """Measure on all ranks."""
    world = session.world
    table = over_contexts if args.contexts else over_sides
    with threadpool_limits(args.threads):
        made = [row for preset in args.presets for row in table(preset, args, world)]
    facts = {
        name: getattr(args, name) for name in ("threads", "prompt_tokens", "new_tokens", "repeats")
    }
    return (
        0
        if world.rank
        else Outcome(
            made, {"ranks": world.size} | facts | results.versions("torch", "transformers", "numba")
        )
    )


main = Program(
    "generate",
    __doc__,
    measure_all,
    together=True,
    add=add_flags,
    counts={
        "--prompt-tokens": (128, "tokens of each prompt"),
        "--new-tokens": (128, "tokens added to each prompt"),
        "--repeats": (5, "repetitions"),
        "--threads": (1, "threads of each rank"),
    },
).started(__name__)
