"""The cost model of a machine: its file, its estimates, and the step that it predicts."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from in_process import assert_refused, printed
from machine_models import LARGE_US, LATENCY_US, US_PER_BYTE, config_of, curve, machine

from mpipar.errors import DataError, OutputError, UsageError
from mpipar.pipeline.simulate import simulate
from mpipar.plan import machine_file
from mpipar.plan.machine import HOP, SENDING, STREAM, Curve, Eager
from mpipar.plan.measure import crowding, unit_counts
from mpipar.plan.step import costs_of, step_estimate, step_parts
from mpipar.train.build import configured_schedule

FLAGS = "--batch-size 16 --num-microbatches 4"  # with dp 2: microbatches of 2 rows


@pytest.fixture
def path(tmp_path):
    name = tmp_path / "machine.json"
    machine_file.save(machine(), name)
    return name


# --- the file


def test_what_was_written_is_read(path):
    assert machine_file.load(path) == machine()


def change(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


BROKEN = {
    "schema 99, this program reads 2": lambda value: value.update(schema=99),
    "not a cost model of a machine": lambda value: value.pop("schema"),
    "the file has no 'curves'": lambda value: value.pop("curves"),
    "the file has an unknown key 'extra'": lambda value: value.update(extra=1),
    "the file.curves must be a list": lambda value: value.update(curves={}),
    "the file.curves[0] must be an object": lambda value: value.update(curves=[3]),
    "curves[1].pieces[0].latency_us is 'x', not a legal float":
        lambda value: value["curves"][1]["pieces"][0].update(latency_us="x"),
    "has nan, which is not a finite number, at 'latency_us'":
        lambda value: value["curves"][0]["pieces"][0].update(latency_us=float("nan")),
    "latency of 2 ranks: no pieces": lambda value: value["curves"][0].update(pieces=[]),
    "latency of 2 ranks: pieces and fitted_bytes must ascend":
        lambda value: value["curves"][0]["pieces"].reverse(),
    "latency of 2 ranks: pieces and fitted_bytes must":
        lambda value: value["curves"][0]["pieces"][-1].update(from_bytes=1e9),
    "the file.curves[0].pieces[0].latency_us is -1: must not be below 0":
        lambda value: value["curves"][0]["pieces"][0].update(latency_us=-1),
    "the file.units[0].block.f is 1e+308: larger or slower than any machine":
        lambda value: value["units"][0]["block"].update(f=1e308),
    "the file.contention[0].factor is -5: must not be below 0":
        lambda value: value["contention"][0].update(factor=-5),
    "products: every combination": lambda value: value["products"].pop(),
    "units: rows, tp and ep": lambda value: value["units"][0].update(rows=0),
    "units: sharing must be at least 1": lambda value: value["units"][0].update(sharing=0.5),
    "units[0].block has no 'w'": lambda value: value["units"][0]["block"].pop("w"),
    "ranks is True, not a legal int": lambda value: value["curves"][0].update(ranks=True),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_file_is_refused_with_its_place(path, message):
    change(path, BROKEN[message])
    with pytest.raises(DataError) as raised:
        machine_file.load(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_difference_of_two_times_may_be_negative(path):
    change(path, lambda value: value.update(call_overhead_us=-7.5))
    assert machine_file.load(path).call_overhead_us == -7.5


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "\x00"])
def test_a_file_of_something_else_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(DataError, match=r"bench\.calibrate"):
        machine_file.load(path)


def test_places_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        machine_file.load(tmp_path / "missing.json")
    for place in (tmp_path, tmp_path / "no" / "machine.json"):
        with pytest.raises(OutputError):
            machine_file.check_writable(place)
        with pytest.raises(OutputError):
            machine_file.save(machine(), place)
        assert not os.path.exists(f"{place}.partial")
    machine_file.check_writable(tmp_path / "machine.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="is a folder or a device"):
        machine_file.check_writable(tmp_path / "pipe")


# --- estimates


def test_an_estimate_says_whether_its_size_was_measured():
    known = machine()
    for nbytes, us, outside in (
        (8, LATENCY_US, False),
        (1024, LATENCY_US, False),
        (2000, LARGE_US + 2000 * US_PER_BYTE, False),
        (4, LATENCY_US, True),
        (8 << 20, LARGE_US + (8 << 20) * US_PER_BYTE, True),
    ):
        guess = known.estimate("all-reduce", nbytes, 4)
        assert guess.seconds == pytest.approx(us * 1e-6)
        assert guess.extrapolated == outside, nbytes
    assert known.estimate("all-gather", 8, 1) == (0.0, False)


def test_lines_through_times_end_in_the_time_of_the_larger_size():
    """Also where the time grows faster than the size. The last size took less than another."""
    times = {200: 4e-6, 100: 1e-6, 400: 5e-6, 800: 2e-6}
    line = Curve.through("sending", "any two ranks", 2, times, 5)
    assert [(piece.latency_us, piece.us_per_byte) for piece in line.pieces] == [
        pytest.approx(pair) for pair in ((0, 0.02), (3, 0.005), (5, 0))
    ]
    found = [line.estimate(size) for size in (150, 200, 400, 800, 1000)]
    assert [one.seconds * 1e6 for one in found] == pytest.approx([3, 4, 5, 5, 5])
    assert [one.extrapolated for one in found] == [False] * 4 + [True]


def test_the_slowest_link_counts_unless_one_is_named():
    known = machine()
    assert known.curve("latency").link == "between nodes"
    assert known.curve("latency", link="same node").link == "same node"


def test_links_compare_at_a_size_that_all_of_them_have():
    """The slow one ends at 4 KiB, which take it less time than 4 MiB take the fast one."""
    short = replace(curve(HOP, "between nodes", 2, 3.0), fitted_bytes=(8, 1024, 4096))
    known = replace(machine(), curves=(curve(HOP, "same node", 2), short))
    assert known.curve(HOP) == short


@pytest.mark.parametrize(
    ("operation", "ranks", "link", "message"),
    [
        ("all-reduce", 8, None, "measured with 2 ranks (same node), 4 ranks (same node)"),
        ("all-reduce", 2, "same socket", "no all-reduce of 2 ranks (same socket)"),
        ("gather", 2, None, "not measured at all"),
    ],
)
def test_what_was_not_measured_is_refused(operation, ranks, link, message):
    with pytest.raises(UsageError) as raised:
        machine().estimate(operation, 8, ranks, link)
    assert message in str(raised.value)


def test_products_are_interpolated_and_beyond_flagged():
    known = machine()  # 1 ns for each multiplication: exact at every shape
    for shape, outside in (
        ((32, 128, 32), False),
        ((64, 50, 100), False),
        ((32, 32, 1000), True),
        ((1, 32, 32), True),
    ):
        guess = known.product_seconds(*shape)
        assert guess.seconds == pytest.approx(1e-9 * np.prod(shape))
        assert guess.extrapolated == outside, shape
    with pytest.raises(UsageError, match="--no-compute"):
        replace(known, products=()).product_seconds(1, 1, 1)


# --- a step


def test_a_step_of_replicas_is_passes_sums_and_update():
    config = config_of(dp=2)
    found = step_estimate(machine(), config)
    block, ends = 3.5e-3, 0.3e-3 + 5e-3
    assert found.pipeline == pytest.approx(4 * (4 * block + ends))
    params = 256 * 128 + 64 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert found.update == pytest.approx(params * 2e-9)
    gradients = 4 * params  # a bucket is 4 MiB: more than any of the six units
    assert found.barriers == pytest.approx(
        (5 * LARGE_US + gradients * US_PER_BYTE + 2 * LATENCY_US) * 1e-6, rel=1e-3
    )
    assert found.extrapolated == ()
    assert found.total == found.pipeline + found.barriers + found.update


def test_zero_gathers_and_scatters_by_halves_and_updates_its_share():
    """ZeRO-3 gathers weights in F and I of each microbatch; the sums are half of an all-reduce."""
    whole = config_of(dp=2)
    shared = replace(whole, memory=replace(whole.memory, zero=3))
    usual, found = (step_estimate(machine(), config) for config in (whole, shared))
    assert found.update == pytest.approx(usual.update / 2)
    assert found.pipeline == usual.pipeline
    params = usual.update / 2e-9
    sums, passes = 0.5, 2 * 4 * 0.5
    seconds = (sums + passes) * 4 * params * US_PER_BYTE * 1e-6
    assert seconds < found.barriers < 1.12 * seconds  # latencies, and the tied table for both ends


def test_a_pipeline_is_simulated_with_the_costs_that_the_machine_gives():
    config = config_of(pp=2)
    message = 2 * 64 * 128 * 4
    costs = costs_of(machine(), config, message)
    assert costs.latency == pytest.approx(3 * LARGE_US * 1e-6)
    assert costs.time_on_link() == pytest.approx(3 * message * US_PER_BYTE * 1e-6)
    assert costs.eager_bytes is costs.cores is None
    assert len(costs.f) == len(costs.stash_bytes) == 6
    schedule = configured_schedule(config.grid)
    makespan = simulate(schedule, costs.merged(unit_counts(config, schedule))).makespan
    assert step_estimate(machine(), config).pipeline == pytest.approx(makespan)


def test_a_pipeline_is_not_faster_than_its_links():
    """Each of gpipe's 16 messages one way takes ten passes on the link."""
    config = config_of(layers=4, num_microbatches=16, pp=2)
    config = replace(config, grid=replace(config.grid, schedule="gpipe"))
    message, us = 2 * 64 * 128 * 4, 0.2
    (slow,) = [
        replace(curve, pieces=tuple(replace(piece, us_per_byte=us) for piece in curve.pieces))
        for curve in machine().curves
        if (curve.operation, curve.link) == ("latency", "between nodes")
    ]
    others = [curve for curve in machine().curves if curve.operation != "latency"]
    cable = replace(machine(), curves=(slow, *others))
    asked = replace(cable, eager=(Eager("between nodes", message // 2),))
    assert [costs_of(one, config, message).is_rendezvous() for one in (cable, asked)] == [0, 1]
    for one in (cable, asked):
        assert step_estimate(one, config).pipeline > 2 * 16 * message * us * 1e-6
    stream = replace(
        slow,
        operation="bandwidth",
        pieces=tuple(replace(piece, us_per_byte=2 * us) for piece in slow.pieces),
    )
    streamed = costs_of(replace(cable, curves=(*cable.curves, stream)), config, message)
    assert streamed.hop() == pytest.approx(costs_of(cable, config, message).hop())
    assert streamed.time_on_link() == pytest.approx(stream.estimate(message).seconds)


def test_a_message_takes_a_share_of_its_senders_core():
    """Half of the time that it keeps the link, or all of it; nothing where nobody measured it."""
    config, message = config_of(pp=2), 2 * 64 * 128 * 4
    busy = costs_of(machine(), config, message).time_on_link()
    for seconds, share in (({}, 0), ({8: 0.0, 2 * message: busy}, 0.5), ({8: 1.0, 9: 1.0}, 1)):
        curves = [
            Curve.through(SENDING, link, 2, seconds, 1)
            for link in ("same node", "between nodes")
            if seconds
        ]
        one = replace(machine(), curves=(*machine().curves, *curves))
        assert costs_of(one, config, message).sending == pytest.approx(share, rel=1e-3)
        found = step_estimate(one, config).pipeline - step_estimate(machine(), config).pipeline
        assert (found > 0) == (share > 0)


def test_more_ranks_than_cores_share_them_and_the_prediction_says_so(path):
    """Four replicas on two cores: passes and update take twice as long."""
    config = config_of(dp=4)
    own, shared = (step_estimate(replace(machine(), cores=cores), config) for cores in (4, 2))
    assert shared.pipeline == pytest.approx(2 * own.pipeline)
    assert shared.update == pytest.approx(2 * own.update)
    assert own.sharing == ""
    assert shared.sharing.startswith("4 ranks share 2 cores: in the prediction, ranks that")
    dearer = replace(
        machine(), units=tuple(replace(units, sharing=1.25) for units in machine().units)
    )
    assert step_estimate(replace(dearer, cores=4), config) == own
    found = step_estimate(replace(dearer, cores=2), config)
    assert found.pipeline == pytest.approx(1.25 * shared.pipeline)
    assert found.update == pytest.approx(1.25 * shared.update)
    assert found.sharing.endswith(" equal shares, and passes take 1.25 times as much of a core")
    piped = [
        step_estimate(replace(machine(), cores=cores), config_of(pp=4)).pipeline
        for cores in (4, 2, 1)
    ]
    assert piped[0] < piped[1] < piped[2] < 4 * piped[0]  # not all four compute all the time
    grid = config_of(dp=2, tp=2).grid
    assert [crowding(grid, cores) for cores in (1, 2, 4, 8)] == [2, 2, 1, 1]
    machine_file.save(replace(machine(), cores=1), path)
    flags = "--batch-size 8 --num-microbatches 4 --layers 4".split()
    text = printed("explain", *flags, "--layout", "dp=2", "--machine", path)
    assert text.splitlines()[-1].startswith("2 ranks share 1 core: in the prediction")


def test_the_parts_of_a_step_add_up():
    for axes in ({"dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}):
        config = config_of(**axes)
        parts, found = step_parts(machine(), config), step_estimate(machine(), config)
        assert sum(parts.values()) == pytest.approx(found.total)
        assert min(parts.values()) >= 0
        for name in ("idle in the pipeline", "messages between stages"):
            assert (parts[name] > 0) == ("pp" in axes)


def test_groups_that_are_not_the_world_disturb_each_other():
    config = config_of(dp=2, pp=2)
    known = machine()
    alone = step_estimate(replace(known, contention=()), config)
    together = step_estimate(known, config)
    assert known.contention_factor("iall-reduce") == 1.7
    assert together.barriers > 1.1 * alone.barriers
    assert (
        step_estimate(known, config_of(dp=4)).barriers
        == step_estimate(replace(known, contention=()), config_of(dp=4)).barriers
    )


def test_any_number_of_blocks_and_rows_that_were_not_measured():
    known = machine()
    deep, usual, many = (
        step_estimate(known, one) for one in (config_of(9), config_of(), config_of(rows=6))
    )
    assert deep.pipeline - usual.pipeline == pytest.approx(4 * 5 * 3.5e-3)
    assert many.pipeline == pytest.approx(3 * usual.pipeline)
    assert usual.extrapolated == ()
    assert many.extrapolated == ("passes of 6 row(s)",)
    sgd = replace(config_of(), train=replace(config_of().train, optimizer="sgd"))
    assert step_estimate(known, sgd).extrapolated == ("the update of sgd, only that of adamw",)


@pytest.mark.parametrize("operation", [HOP, STREAM, SENDING])
def test_a_message_larger_than_one_of_its_curves_was_not_measured(operation):
    for largest, found in ((4 << 20, ()), (1024, (f"a message of {2 * 64 * 128 * 4} bytes",))):
        short = replace(curve(operation, "slow", 2, 9), fitted_bytes=(8, largest))
        others = [curve(name, "slow", 2, 9) for name in {HOP, STREAM, SENDING} - {operation}]
        known = replace(machine(), curves=(short, *others, curve("all-reduce", "slow", 2)))
        assert step_estimate(known, config_of(pp=2)).extrapolated == found


# --- mpipar explain --machine


def test_explain_prints_the_time_of_a_step(path):
    text = printed("explain", *FLAGS.split(), "--layout", "dp=2", "--machine", path)
    expected = step_estimate(machine(), config_of(dp=2))
    line = text.splitlines()[-1]
    assert line.startswith(f"predicted step: {expected.total * 1e3:.2f} ms = "), line
    assert f"{expected.update * 1e3:.2f} update" in line
    more = printed(
        "explain",
        "--layout",
        "dp=2",
        "--batch-size",
        "24",
        "--num-microbatches",
        "4",
        "--machine",
        path,
    )
    assert more.splitlines()[-1] == "extrapolated, not measured: passes of 3 row(s)"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--layout", "dp=2,tp=2"], 2, "tp 1 (not 2)"),
        (["--layout", "dp=8", "--batch-size", "64"], 2, "no iall-reduce of 8 ranks"),
        (["--layout", "cp=2"], 2, "cp 2: a cost model has no passes on a part of the tokens"),
        (["--d-model", "64"], 2, "d_model 128 (not 64)"),
        (["--machine", "/missing.json"], 65, "/missing.json: No such file"),
        (["--machine", ""], 2, "or a file that ends in .toml"),
    ],
)
def test_explain_says_what_the_cost_model_lacks(path, words, code, message):
    assert_refused(code, [message], "explain", "--machine", path, *words)
