"""Training with schedules: by name, from CSV, refused, and measured."""

import json
import re

import pytest
from in_process import assert_refused, printed
from program import TEXT, mpipar

SMALL = [
    *TEXT,
    *"""--layers 4 --d-model 16 --heads 2 --seq-len 8 --batch-size 8
    --num-microbatches 4 --steps 3 --sample-tokens 3 --dtype float64 --layout pp=2""".split(),
]


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_a_schedule_from_a_csv_file_trains_like_the_one_by_name(tmp_path):
    path, name = tmp_path / "order.csv", "zb-v"
    printed("schedule", name, "--pp", 2, "--num-microbatches", 4, "--csv", path)
    runs = {"name": ["--schedule", name], "csv": ["--schedule-csv", path]}
    for out, flags in runs.items():
        result = mpipar("train", *SMALL, *flags, "--out", tmp_path / out, ranks=2).ended()
        assert "text generated" in result.stdout
        assert f", schedule {path if out == 'csv' else name}, " in result.stdout.splitlines()[0]
    assert losses(tmp_path / "csv") == losses(tmp_path / "name")


def test_what_a_csv_file_does_not_leave_open_is_refused(tmp_path):
    path = tmp_path / "order.csv"
    printed("schedule", "zb-v", "--pp", 2, "--num-microbatches", 4, "--csv", path)
    own = [f"{flag} with --schedule-csv {path}" for flag in ("--schedule zb-v", "--chunks 3")]
    assert_refused(
        2,
        [*own, "--stage-layers 2,2 with", "use as many numbers as"],
        "explain",
        "--pp",
        2,
        "--schedule-csv",
        path,
        "--schedule",
        "zb-v",
        "--chunks",
        3,
        "--stage-layers",
        "2,2",
    )


def test_a_csv_file_with_its_own_sends_trains_evaluates_and_generates(tmp_path):
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
    ]
    (tmp_path / "full.csv").write_text("\n".join(rows) + "\n")
    result = mpipar(
        "train",
        *SMALL,
        "--num-microbatches",
        2,
        "--out",
        tmp_path / "run",
        "--schedule-csv",
        tmp_path / "full.csv",
        ranks=2,
    ).ended()
    assert "held-out loss" in result.stdout


@pytest.mark.parametrize(("rows", "what"), [
    (["0F0,0B0,0F1,0B1", "1F0,1B0,1B1,1F1"], "1B1"),
    (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1"], "1B1"),
    (["0F0,0B0"], "--pp 1"),
])  # fmt: skip
def test_a_broken_csv_file_is_refused(tmp_path, rows, what):
    (tmp_path / "bad.csv").write_text("\n".join(rows) + "\n")
    assert_refused(
        2,
        [what],
        "train",
        *SMALL,
        "--num-microbatches",
        2,
        "--out",
        tmp_path / "run",
        "--schedule-csv",
        tmp_path / "bad.csv",
        ranks=2,
    )
    assert not (tmp_path / "run").exists()


def test_measured_bubble_stands_beside_the_simulated_one(tmp_path):
    result = mpipar("train", *SMALL, "--schedule", "naive", "--out", tmp_path / "run", ranks=2)
    assert "busy share and bubble of naive" in result.stdout, result.tail()
    pattern = r"^(\d) +([\d.]+)% +([\d.]+)% +[\d.]+ ms +[\d.]+ ms$"
    rows = re.findall(pattern, result.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    # One microbatch in flight: the simulated shares of both ranks add up to all of the time.
    assert sum(float(row[2]) for row in rows) == pytest.approx(100, abs=0.2)
