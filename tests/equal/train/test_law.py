"""The law of equality: every layout gives one rank's results to 1e-12, and sends what is predicted.

Loss, norm, every gradient, and every weight after a plain SGD step are compared. Layouts,
schedules, cuts, recomputation, ZeRO, context parallelism, models and experts are drawn: most pairs
of values meet.
Receive buffers are full of NaN before a message is there, and every send waits for its receiver.
"""

import itertools
from dataclasses import replace

import pytest
from drawn import ROWS, cases, config_of, text_of
from small_model import (
    MODEL,
    WORLD,
    assert_equals_known,
    assert_records_predicted,
    small_config,
)

from mpipar.models import decoder
from mpipar.pipeline.schedules.catalog import SCHEDULES

QUICK = {1: 8, 2: 16, 4: 16}.get(WORLD.size, 50)  # the first cases have most of the pairs
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def cases_of(quick, count=None):
    """The drawn cases or the first `count`, of which the first `quick` are for README's command."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=text_of(case), marks=[pytest.mark.slow] * (number >= quick))
            for number, case in enumerate(cases(WORLD.size)[:count])
        ],
    )


@pytest.fixture(autouse=True)
def more_rows_of_blocks(monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(decoder.BLOCKS, name, row)


@cases_of(QUICK)
def test_layout_equals_one_rank(case):
    assert_equals_known(config_of(case))


@cases_of({1: 4, 2: 12, 4: 8}.get(WORLD.size, 50), {2: 60, 4: 32, 8: 8}.get(WORLD.size))
def test_shapes_only_run_predicts_every_record(case):
    assert_records_predicted(config_of(case))


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        *((schedule, {"zero": 3}) for schedule in SCHEDULES),
        *itertools.product(
            ("1f1b", "interleaved", "zb-v"),  # one of each placement
            ({"zero": 1}, {"zero": 3, "reshard_after_forward": "no"}),
        ),
    ],
)
def test_zero_in_every_pipeline(schedule, zero):
    """Drawn pairs may meet ZeRO and a schedule on one stage; here pp has two ranks."""
    config = small_config(
        (2, 2, 1),
        4,
        replace(MODEL, layers=4, seq_len=8),
        schedule=schedule,
        recompute="block",
        **zero,
    )
    assert_equals_known(config)
    assert_records_predicted(config)
