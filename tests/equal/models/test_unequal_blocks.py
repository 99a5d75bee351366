"""Models in which every second block has other layers: how they are split, and a broken twin."""

from dataclasses import asdict

import pytest
from drawn import ROWS, WIDE, Halves, Wide
from small_model import (
    EVEN,
    MODEL,
    WORLD,
    assert_caught,
    assert_equals_known,
    computed_once,
    plant,
    real_step,
    small_config,
)

from mpipar import models
from mpipar.layers.norm import Residual
from mpipar.models import decoder

AGAIN = {"recompute": "block"}
# Ranks: [((dp, pp, tp), cp, schedule, other values)]
CASES = {
    2: [
        ((1, 2, 1), 1, "1f1b", AGAIN),
        ((1, 1, 2), 1, "1f1b", AGAIN | {"sequence_parallel": True}),
    ],
    3: [((1, 3, 1), 1, "zb-h1", {})],
    4: [((1, 4, 1), 1, "1f1b", AGAIN), ((1, 2, 2), 1, "zb-v", AGAIN)],
}
HERE = CASES.get(WORLD.size, [])
pytestmark = [pytest.mark.ranks(*CASES), pytest.mark.usefixtures("poisoned_memory")]
every_case = pytest.mark.parametrize("case", HERE, ids=str)


@pytest.fixture(autouse=True)
def rows_of_the_test(monkeypatch):
    """More rows of BLOCKS."""
    for name, row in ROWS.items():
        monkeypatch.setitem(decoder.BLOCKS, name, row)


def config_for(family, case, **values):
    layout, cp, schedule, more = case
    return small_config(
        layout, 4, family(**asdict(EVEN)), cp=cp, schedule=schedule, **more, **values
    )


@every_case
def test_split_goes_by_the_costs(case):
    """Five blocks cost 1, 3, 1, 3, 1 and a small head."""
    config = config_for(Wide, case)
    worker, _ = real_step(config)
    flops = models.unit_flops(config.model).blocks
    assert flops[1] == 3 * flops[0]
    if case[2] == "1f1b" and case[0][1] == 2:
        assert worker.stage_layers == (3, 2)
    if case[2] == "1f1b" and case[0][1] == 4:
        assert worker.stage_layers == (1, 1, 2, 1)
    widths = {param.name: param.shape[-1] for flat in worker.flats for param in flat.params}
    for index in range(5):
        name = f"block{index}.ffn.up.w"
        assert widths.get(name, MODEL.ffn) in (MODEL.ffn, WIDE)
        if name in widths:
            assert (widths[name] > MODEL.ffn) == index % 2


# --- broken twins


@pytest.mark.ranks(2)
def test_a_gradient_that_does_not_flow_around_a_branch_is_caught(monkeypatch):
    config = config_for(Halves, HERE[0])
    assert_equals_known(config)  # keeps the true tensors

    plant(
        monkeypatch,
        Residual,
        "backward_input",
        lambda _, self, dy, stash: self.norm.backward_input(
            self.branches[0].backward_input(dy, stash), stash
        ),
    )
    assert_caught(config, computed_once)
