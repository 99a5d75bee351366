"""The law of equality: every layout gives one rank's results to 1e-12, and sends what is predicted.

Loss, norm, every gradient, and every weight after a plain SGD step are compared. Layouts,
schedules, cuts, recomputation, ZeRO, context parallelism, models and experts are drawn: every two
values meet.
Receive buffers are full of NaN before a message is there, and every send waits for its receiver.
"""

import pytest
from drawn import ROWS, cases, config_of, text_of
from small_model import (
    WORLD,
    assert_equals_known,
    assert_records_predicted,
)

from mpipar.models import decoder

QUICK = {1: 8, 2: 24, 4: 24}.get(WORLD.size, 50)  # the first cases have most of the pairs
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def cases_of(quick):
    """The drawn cases, of which the first ones are quick."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=text_of(case), marks=[pytest.mark.slow] * (number >= quick))
            for number, case in enumerate(cases(WORLD.size))
        ],
    )


@pytest.fixture(autouse=True)
def more_rows_of_blocks(monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(decoder.BLOCKS, name, row)


@cases_of(QUICK)
def test_layout_equals_one_rank(case):
    assert_equals_known(config_of(case))


@cases_of({1: 4, 2: 36, 4: 20}.get(WORLD.size, 50))
def test_shapes_only_run_predicts_every_record(case):
    assert_records_predicted(config_of(case))
