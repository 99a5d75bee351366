"""A decoder whose step takes milliseconds, and the comparison of that step with one rank's.

Twins plant a bug and compare. Widths are odd where a cut must pad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpipar.comm.grid import AXES
from mpipar.comm.recorder import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.run.verify import Difference, compare_with_one_rank, one_rank_tensors

MODEL = ModelConfig(layers=2, d_model=12, heads=4, ffn=21, seq_len=6, vocab_size=17)
ROWS = 2  # of a microbatch


def small_config(
    layout: dict[str, int], num_microbatches: int = 2, model=MODEL, **changes
) -> Config:
    """Return a resolved float64 configuration with plain SGD, which hides no wrong scale.

    layout: {axis: size}; further axes have size 1. changes: further fields of a GridConfig.
    """
    sizes = dict.fromkeys(AXES, 1) | layout
    grid = GridConfig(**sizes, num_microbatches=num_microbatches, **changes)
    rows = sizes["dp"] * num_microbatches * ROWS
    config = Config(
        model=model,
        grid=grid,
        train=TrainConfig(batch_size=rows, optimizer="sgd", lr=0.1, bucket_bytes=999),
        run=RunConfig(dtype="float64", seed=3, check_comm=True),
    )
    return resolve(config, math.prod(sizes[axis] for axis in AXES))[0]


def tokens() -> np.ndarray:
    """Return random tokens of the small vocabulary, the same on every rank."""
    return np.random.default_rng(7).integers(0, MODEL.vocab_size, 2000).astype(np.uint8)


@dataclass(frozen=True)
class Outcome:
    """A step of the small model, compared with one rank's.

    differences: of every tensor, on world rank 0. recorder: what this rank sent.
    """

    differences: list[Difference]
    recorder: Recorder

    @property
    def wrong(self) -> list[Difference]:
        return [one for one in self.differences if not one.ok]


def expected_tensors(config, world):
    """Return what one rank computes, on world rank 0; None elsewhere. It sends nothing."""
    return None if world is not None and world.rank else one_rank_tensors(config, tokens())


def step_beside(config, world, expected) -> Outcome:
    """Run a step with the code as it is now, and compare it with `expected_tensors`.

    Comm: a training step, and two streams of tensors to world rank 0.
    """
    recorder = Recorder()
    found = compare_with_one_rank(config, tokens(), world, lambda *_: expected, recorder=recorder)
    return Outcome(found, recorder)
