"""Bugs that shipped: what each does to the loss and to the gradient, and which check detects it.

Two ranks run each twin of this folder for a second. They compare a step with one rank's, and a
short training run with the same run without the bug.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from bench.claims import layout_name
from bench.training import Trained
from mpipar import ops as ops_module
from mpipar.comm.objects import broadcast_text
from mpipar.comm.recorder import Recorder
from mpipar.errors import DriftError, HangError
from mpipar.run.replicas import Replicas
from tests.helpers.twins import small_model
from tests.helpers.twins.planted import GITHUB, TWINS, Twin

STEPS, LAST = 40, 5  # of a training run, and those whose mean loss is shown
TRAINING = {"steps": STEPS, "optimizer": "adamw", "lr": 0.01, "warmup_steps": 5, "clip": 1.0}
MODEL = {name: getattr(small_model.MODEL, name) for name in ("layers", "d_model", "heads")}
OF_EXPERTS, SHOWN = ("experts", "router"), (1, 5, 10, 20, 30, 40)  # of `curves`
LOOKS_RIGHT = 0.1  # nats: runs with other rows or initial weights differ by as much


def cases() -> Iterator[tuple[str, Twin, dict[str, int]]]:
    """Yield (name, twin, layout) of each row."""
    for name, twin in TWINS.items():
        for layout in twin.layouts:
            yield name, twin, layout


def shipped(world: Any) -> list[dict] | None:
    """Return a row for each twin and layout; on world rank 0, None elsewhere.

    Comm: everything of some training steps per row.
    """
    rows = [row(name, twin, layout, world) for name, twin, layout in cases()]
    return rows if world.rank == 0 else None


def row(name: str, twin: Twin, layout: dict[str, int], world: Any) -> dict:
    """Return one row, valid on world rank 0. Comm: some training steps, and the checks of each."""
    model = replace(small_model.MODEL, **twin.model)
    config = small_model.small_config(layout, model=model, schedule=twin.schedule)
    found, seen = {}, []
    try:
        found |= first_step(config, twin, world)
        seen += ["verify"] * found.pop("differs")
    except HangError:
        seen.append("--check-comm")
    if not twin.desync:
        right, _ = train(config, ExitStack(), world)
        losses, drifted = train(config, twin.plant(), world)
        seen += ["--check-replicas"] * drifted
        found |= {
            "loss_right": end(right),
            "loss_with_bug": end(losses),
            "curve": looks(losses, end(right)),
        }
    columns = ("loss_right", "loss_with_bug", "curve", "gradient_error", "wrong_gradients")
    return {
        "twin": name,
        "bug": twin.cause,
        "layout": layout_name(layout),
        **{column: found.get(column, "-") for column in columns},
        "seen_by": ", ".join(seen) or "none",
        "published": ", ".join(f"[{short(one)}]({GITHUB}{one})" for one in twin.threads) or "-",
    }


def curves(world: Any) -> list[dict] | None:
    """Return losses at some steps, of each twin of experts and without bug; None but on world rank
    0.

    Comm: everything of two training runs per twin.
    """
    rows = []
    for name, of_run in itertools.product(OF_EXPERTS, ("right", "with the bug")):
        twin = TWINS[name]
        config = small_model.small_config(
            twin.layouts[0], model=replace(small_model.MODEL, **twin.model)
        )
        planted = ExitStack() if of_run == "right" else twin.plant()
        losses, _ = train(config, planted, world)
        rows.append(
            {"twin": name, "layout": layout_name(twin.layouts[0]), "loss": of_run}
            | {f"step_{step}": losses[step - 1] for step in SHOWN}
        )
    return rows if world.rank == 0 else None


def short(thread: str) -> str:
    """Return a thread as people cite it: repository and number."""
    _, repository, _, number = thread.split("/")
    return f"{repository} #{number}"


def first_step(config: Any, twin: Twin, world: Any) -> dict:
    """Return what is wrong in a twin's first step. Raises HangError if ranks' calls differ.

    differs: whether anything does, on every rank. gradient_error: the largest, as a share of the
    largest number of its tensor. Comm: a training step, its tensors, and a broadcast.
    """
    expected = small_model.expected_tensors(config, world)
    with twin.plant():
        outcome = small_model.step_beside(config, world, expected)
    gradients = [one for one in outcome.differences if one.kind == "gradient"]
    wrong = [one for one in gradients if not one.ok]
    return {
        "differs": broadcast_text(world, "x" * bool(outcome.wrong)) == "x",
        "gradient_error": max((one.error for one in wrong), default=0.0),
        "wrong_gradients": f"{len(wrong)} of {len(gradients)}",
    }


def end(losses: list[float]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.mean(losses[-LAST:])


def looks(losses: list[float], right: float) -> str:
    """Return how a loss curve looks that should end at `right`."""
    if end(losses) < right + LOOKS_RIGHT:
        return "looks right"
    return "falls" if end(losses) < 0.9 * losses[0] else "does not fall"


def train(
    config: Any, planted: AbstractContextManager, world: Any, steps: int = STEPS
) -> tuple[list[float], bool]:
    """Train; return (loss of each step, whether copies of a tensor drifted apart).

    Comm: all of it, and a comparison of copies after each step.
    """
    config = replace(config, train=replace(config.train, **TRAINING))
    ops, drifted, losses = ops_module.make("cpu", config.run.dtype), False, []
    with planted:
        trained = Trained(config, world, Recorder(), learnable(), ops)
        replicas = Replicas(trained.worker)
        for step in range(1, steps + 1):
            losses.append(trained.step(step).loss)
            if not drifted:
                try:
                    replicas.check(step)
                except DriftError:
                    drifted = True
        trained.worker.close()
    return losses, drifted


def learnable() -> np.ndarray:
    """Return tokens most of which follow from the previous one, so that the loss falls quickly."""
    random, size = np.random.default_rng(11), small_model.MODEL.vocab_size
    tokens = random.integers(0, size, 4000)
    for place in np.flatnonzero(random.random(len(tokens)) < 0.8)[1:]:
        tokens[place] = (3 * tokens[place - 1] + 1) % size
    return tokens.astype(np.uint8)
