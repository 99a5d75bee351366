"""A cost model's predictions for a benchmark's rows, and rows that it does not cover."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench_rows import BARE, row
from machine_models import curve, machine

from bench import plot, table, verify
from bench.machine.predicted import beside

FITTED = {"transport": "mpi-host", "dtype": "float32", "buffers": ["rotated"]}
MODEL = replace(machine(), provenance=FITTED)


def test_a_row_stands_beside_its_prediction():
    found = beside(MODEL, row(size=10_000, median=60.0))  # 20 us and 1 us for each 1000 bytes
    assert found == pytest.approx({"predicted_us": 30.0, "measured_over_predicted": 2.0})


@pytest.mark.parametrize(
    "change",
    [
        {"via": BARE},
        {"mode": "together"},
        {"sync": "none"},
        {"buffers": "reused"},
        {"dtype": "float64"},
        {"transport": "staged"},
        {"case": "fan-in"},
        {"ranks": (0, 1, 2)},
        {"link": "same socket"},
        {"size": 8 << 20},
        {"size": 4},
    ],
    ids=str,
)
def test_what_the_model_was_not_fitted_to_has_none(change):
    assert beside(MODEL, row(**change)) == {}


def test_a_chain_is_predicted_from_messages_on_its_own_link():
    chain = row("stage-chain 1f1b", size=10_000)
    near = replace(MODEL, curves=(*MODEL.curves, curve("bidirectional", "same node", 2)))
    far = tuple(
        curve(operation, "between nodes", 2, 9.0) for operation in ("latency", "bidirectional")
    )
    both = replace(near, curves=(*near.curves, *far))
    assert beside(both, chain) == beside(near, chain) != {}
    assert beside(replace(near, curves=far), chain) == {}


def test_what_was_measured_otherwise_has_a_picture_of_its_own():
    assert len(plot.by_picture([row(), row(sync="none"), row(dtype="float64")])) == 3


def test_a_model_is_verified_by_messages_as_those_that_it_is_of(monkeypatch):
    def open_bench(session, *found):
        raise StopIteration(found)

    fitted = {"transport": "staged", "dtype": "float64", "buffers": ["reused"]}
    monkeypatch.setattr(verify, "prepared", lambda *_: replace(MODEL, provenance=fitted))
    monkeypatch.setattr(verify, "open_bench", open_bench)
    session = SimpleNamespace(agree=lambda function: function(), world=SimpleNamespace(rank=0))
    with pytest.raises(StopIteration) as stopped:
        verify.one_launch(session, verify.main.parse(["machine.json"]))
    assert stopped.value.value == ("float64", "reused", "staged")


def test_tables_have_the_columns_only_with_a_model():
    rows = [row(), row(size=8 << 20)]
    plain, more = table.as_text(rows), table.as_text([one | beside(MODEL, one) for one in rows])
    assert "predicted_us" not in plain
    assert "predicted_us" in more
    assert more.splitlines()[2].split()[-2:] == ["5.000", "2.000"]
    lines = table.as_csv([one | beside(MODEL, one) for one in rows]).splitlines()
    assert lines[0].endswith("predicted_us,measured_over_predicted")
    assert lines[1].endswith(",5.0,2.0")
    assert lines[2].endswith(",,")
