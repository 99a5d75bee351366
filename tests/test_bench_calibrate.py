"""bench.calibrate and bench.verify from end to end, on two ranks and few sizes.

On a loaded machine the accuracy of a fit means nothing; bench/results/verify.json shows it. Here a
wrong cost model must be found out.
"""

import csv
import json
import sys
from dataclasses import replace

import pytest
from helpers import run_command, run_ranks
from program import LIMIT, environment, one_block

from bench import calibrate
from bench.interconnect.budget import LEAST_SIZES
from bench.machine.measuring import layouts
from mpipar.config.memory import MemoryConfig
from mpipar.config.sections import Config
from mpipar.errors import DataError
from mpipar.plan import machine_file

SHORT = ("--seconds", "6", "--end-bytes", "32K")
OPERATIONS = {
    "latency",
    "bandwidth",
    "bidirectional",
    "all-reduce",
    "iall-reduce",
    "all-gather",
    "reduce-scatter",
}
STEPS = {f"step {name}" for name, _ in layouts(2, 1)}
WRONG = 1000  # times the measured value: no load of the machine hides that


def bench(name, *words, ranks=2):
    argv = [sys.executable, "-m", f"bench.{name}", *map(str, words)]
    if ranks is None:
        return run_command(argv, LIMIT, environment())
    return run_ranks(ranks, argv, LIMIT, environment())


@pytest.mark.parametrize(
    "memory",
    [
        {"zero": 1},
        {"zero": 3, "reshard_after_forward": "no"},
        {"recompute": "block"},
    ],
)
def test_passes_are_measured_without_what_the_prediction_adds(memory):
    config = replace(Config(), memory=MemoryConfig(**memory))
    args = calibrate.main.parse(["--rows", "2", "--tp", "1,2"])
    assert [(one.memory, one.grid.tp) for one in calibrate.pass_configs(args, config, 2)] == [
        (MemoryConfig(), 1),
        (MemoryConfig(), 2),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """machine.json and rows.jsonl of a short calibration."""
    folder = tmp_path_factory.mktemp("calibrate")
    done = bench(
        "calibrate",
        *SHORT,
        "--rows",
        "1",
        "--out",
        folder / "machine.json",
        "--json",
        folder / "rows.jsonl",
    )
    assert done.returncode == 0, done.tail()
    assert "passes of 1 row(s), tp 1" in done.stdout
    return folder


@pytest.mark.slow
def test_the_model_holds_every_operation_and_where_it_comes_from(folder):
    machine = machine_file.load(folder / "machine.json")
    curves = {curve.operation: curve for curve in machine.curves}
    assert set(curves) == {*OPERATIONS, "barrier", "reduce-local"}
    for name in OPERATIONS:
        assert set(curves[name].fitted_bytes) <= {8 << k for k in range(13)}, name
        assert len(curves[name].fitted_bytes) >= LEAST_SIZES, name
        assert 0.1 < curves[name].estimate(8).seconds * 1e6 < 1e5, name
        for piece in curves[name].pieces:
            assert piece.latency_low_us <= piece.latency_us <= piece.latency_high_us
    assert len(machine.products) == 27
    (unit,) = machine.units
    assert (unit.rows, unit.tp, unit.dtype) == (1, 1, "float32")
    assert min(unit.block.f, unit.block.i, unit.block.w) > 0 < unit.update_seconds_per_parameter
    assert {"machine", "launches", "library", "places", "files", "dtype"} <= set(machine.provenance)


@pytest.mark.slow
def test_the_kept_rows_give_the_same_fit_without_measuring(folder):
    again = folder / "again.json"
    done = bench("calibrate", folder / "rows.jsonl", "--no-compute", "--out", again, ranks=None)
    assert done.returncode == 0, done.tail()
    first, second = machine_file.load(folder / "machine.json"), machine_file.load(again)
    assert second.curves == tuple(
        curve for curve in first.curves if curve.operation != "reduce-local"
    )
    assert second.provenance["files"] == [str(folder / "rows.jsonl")]
    assert (second.products, second.units) == ((), ())


@pytest.mark.slow
def test_the_rows_stand_beside_their_own_model(folder):
    done = bench(
        "table",
        folder / "rows.jsonl",
        "--machine",
        folder / "machine.json",
        "--format",
        "csv",
        ranks=None,
    )
    assert done.returncode == 0, done.tail()
    found = {row["case"] for row in csv.DictReader(done.stdout.splitlines()) if row["predicted_us"]}
    assert found >= OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("part", ["latency", "step"])
def test_verify_finds_a_wrong_model_out(folder, part):
    value = json.loads((folder / "machine.json").read_text())
    if part == "latency":
        value["units"] = []
        for curve in value["curves"]:
            for piece in curve["pieces"] if curve["operation"] == part else []:
                for name in ("latency_us", "us_per_byte"):
                    piece[name] *= WRONG
    else:
        for kind in "fiw":
            value["units"][0]["block"][kind] *= WRONG
    path, result = folder / f"{part}.json", folder / f"verify-{part}.json"
    details = folder / "made" / f"verify-{part}.jsonl"
    path.write_text(json.dumps(value))
    done = bench(
        "verify", path, "--sizes", "2", "--seconds", "6", "--json", result, "--details", details
    )
    assert done.returncode == 1, done.tail()
    verdicts = {row["what"]: row for row in json.loads(result.read_text())["rows"]}
    wrong = {what for what in verdicts if what.startswith(part)}
    assert wrong == ({"latency"} if part == "latency" else STEPS)
    assert {verdicts[what]["verdict"] for what in wrong} == {"NOT KEPT"}
    assert {*OPERATIONS, "stage-chain 1f1b", "all-reduce as ring", "product"} <= set(verdicts)
    assert verdicts["stage-chain 1f1b"]["verdict"] == "information"
    for one in map(json.loads, details.read_text().splitlines()):
        assert one["error"] == pytest.approx(one["predicted_us"] / one["measured_us"] - 1)
        if one["what"].startswith("step") or one["detail"] == "200000 bytes":
            assert one["extrapolated"], one  # 32 KiB are the largest that was measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["calibrate", "--rows", "0"], 2, "whole number above 0"),
        (["calibrate", "--tp", "3"], 2, "--tp 3: does not divide the 2 ranks"),
        (["calibrate", "--out", "/missing/machine.json"], 74, "its folder is missing"),
        (["calibrate", "--json", "/dev/null/v"], 74, "--json /dev/null/v: Not a directory"),
        (["calibrate", "--end-bytes", "16"], 2, "a fit needs 3 sizes; give 32 or more"),
        (["calibrate", "--no-compute", "--rows", "3"], 2, "--no-compute leaves out"),
        (["calibrate", "/missing.jsonl"], 65, "/missing.jsonl: No such file"),
        (["verify", "/missing.json"], 65, "write it with python -m bench.calibrate"),
        (["verify", "x", "--details", "/dev/null/v"], 74, "--details /dev/null/v: Not a directory"),
        (["verify", "machine.json", "--launches", "2"], 2, "run it without"),
        (["verify", "machine.json", "--start", "srun"], 2, "add --launches 5"),
        (["calibrate", "rows.jsonl", "--end-bytes", "5"], 2, "FILEs hold it already"),
    ],
)
def test_mistakes_are_named(words, code, message):
    found, block = one_block(bench(*words))
    assert found == code
    assert message in block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace('"link":', '"lnk":'), "lacks link"),
        (
            lambda text: text.replace('"via":"mpipar.comm"', '"via":"mpi4py"'),
            "no operation through",
        ),
        (lambda text: text.replace('"sync":"barrier"', '"sync":"none"'), "calls back to back"),
        (lambda text: text.replace('"schema":2', '"schema":7'), "schema 7, this program reads 2"),
    ],
)
def test_rows_that_cannot_be_fitted_are_refused(folder, edit, message):
    (folder / "broken.jsonl").write_text(edit((folder / "rows.jsonl").read_text()))
    found, block = one_block(
        bench(
            "calibrate",
            folder / "broken.jsonl",
            "--no-compute",
            "--out",
            folder / "none.json",
            ranks=None,
        )
    )
    assert found == 65
    assert message in block
    assert not (folder / "none.json").exists()


@pytest.mark.slow
def test_rows_of_two_kinds_and_rows_that_are_too_few_are_refused(folder):
    text, path = (folder / "rows.jsonl").read_text(), folder / "others.jsonl"
    path.write_text(text.replace('"buffers":"rotated"', '"buffers":"reused"'))
    with pytest.raises(DataError, match="buffers reused and rotated: one model cannot hold both"):
        calibrate.read_rows([str(folder / "rows.jsonl"), str(path)])
    path.write_text("".join(text.splitlines(True)[:3]))
    with pytest.raises(DataError, match=r"no operation .* with 3 sizes or more to fit"):
        calibrate.read_rows([str(path)])


@pytest.mark.slow
def test_launches_that_end_early_are_told(folder):
    found, block = one_block(
        bench("verify", folder / "machine.json", "--launches", "2", "--start", "false", ranks=None)
    )
    assert found == 69
    assert "launch 1: false" in block
    assert "ended with code 1 and compared nothing" in block
