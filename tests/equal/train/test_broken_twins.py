"""The comparison with one rank must fail for known bugs: each is planted here once.

docs/bugs.md shows the same twins. What it says of gradients and of checks must hold here.
"""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from small_model import WORLD

from bench import results
from bench.claims import layout_name
from mpipar.errors import HangError
from tests.helpers.twins import shipped, small_model
from tests.helpers.twins.planted import DP, PP, TP

pytestmark = pytest.mark.ranks(2)
CASES = list(shipped.cases())
FILE = results.ROOT / "bench" / "results" / "twins_shipped.json"
ROWS = {(row["twin"], row["layout"]): row for row in json.loads(FILE.read_text())["rows"]}
OF_TIMING = {"aliased buffer", "summed early"}  # their errors depend on when a message arrives
STEPS = 3


def said(name, layout):
    """The row of docs/bugs.md."""
    return ROWS[name, layout_name(layout)]


def configured(twin, layout):
    model = replace(small_model.MODEL, **twin.model)
    return small_model.small_config(layout, model=model, schedule=twin.schedule)


def test_every_twin_is_on_the_page():
    assert [(name, layout_name(layout)) for name, _, layout in CASES] == list(ROWS)
    assert sum(row["published"] != "-" for row in ROWS.values()) >= 16
    assert {row["seen_by"] for row in ROWS.values()} >= {"none", "verify", "--check-comm"}


@pytest.mark.parametrize(("name", "twin", "layout"), CASES)
def test_a_twin_does_what_the_page_says(name, twin, layout):
    row, config = said(name, layout), configured(twin, layout)
    if twin.desync:
        assert row["seen_by"] == "--check-comm"
        with pytest.raises(HangError, match="ranks disagree"):
            shipped.first_step(config, twin, WORLD)
        return
    found = shipped.first_step(config, twin, WORLD)
    assert found["differs"] == ("verify" in row["seen_by"])
    if WORLD.rank == 0 and name not in OF_TIMING:
        assert found["gradient_error"] == pytest.approx(row["gradient_error"], rel=1e-6)
        assert found["wrong_gradients"] == row["wrong_gradients"]
    _, drifted = shipped.train(config, twin.plant(), WORLD, STEPS)
    assert drifted == ("--check-replicas" in row["seen_by"])


@pytest.mark.parametrize("layout", [DP, PP, TP], ids=str)
def test_without_a_bug_no_copy_drifts(layout):
    losses, drifted = shipped.train(small_model.small_config(layout), ExitStack(), WORLD, STEPS)
    assert not drifted
    assert len(losses) == STEPS
