"""The fit of latency and bandwidth: known parameters come back from synthetic samples."""

import bench_rows
import numpy as np
import pytest

from bench.machine.fitting import (
    best_breaks,
    contention,
    curves,
    duplex,
    fit,
    held_out,
    overhead,
    quietest,
    robust_line,
)
from bench.machine.predicted import all_reduce_models, judge
from bench.verify import held_out_sizes

SIZES = [8 * 2**k for k in range(20)]
SMALL, LARGE = (3.0, 2e-4), (12.0, 7e-5)  # latency in us, us per byte: below and from 8 KiB on
BREAK = 8 << 10


def truth(size):
    latency, per_byte = SMALL if size < BREAK else LARGE
    return latency + size * per_byte


def samples(rng, size, count=200, noise=0.03, shift=1.0):
    """Realistic times: skewed, never far below the true time, a few very late."""
    times = truth(size) * shift * (1 + noise * rng.standard_normal(count))
    late = rng.random(count) < 0.04
    return np.where(late, times * rng.uniform(3, 40, count), times)


def data(seed, launches=3, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return {size: [samples(rng, size) for _ in range(launches)] for size in sizes}


@pytest.mark.parametrize("seed", range(3))
def test_pieces_and_parameters_are_recovered(seed):
    curve = fit("latency", "same node", 2, data(seed))
    assert len(curve.pieces) == 2, curve
    assert BREAK / 2 <= curve.pieces[0].to_bytes == curve.pieces[1].from_bytes <= BREAK
    for piece, (latency, per_byte) in zip(curve.pieces, (SMALL, LARGE), strict=True):
        assert piece.latency_us == pytest.approx(latency, rel=0.02)
        assert piece.us_per_byte == pytest.approx(per_byte, rel=0.05)
    for size in SIZES:
        guess = curve.estimate(size)
        assert guess.seconds * 1e6 == pytest.approx(truth(size), rel=0.02), size
        assert not guess.extrapolated
    assert curve.held_out_median < 0.02
    assert curve.samples == 20 * 3 * 200


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of the 95 % intervals of 2 pieces x 2 parameters x 15 fits at least 90 % hold (54 of 60)."""
    inside = 0
    for seed in range(15):
        curve = fit("latency", "same node", 2, data(seed, launches=5))
        for piece, (latency, per_byte) in zip(curve.pieces, (SMALL, LARGE), strict=True):
            inside += piece.latency_low_us <= latency <= piece.latency_high_us
            inside += piece.us_per_byte_low <= per_byte <= piece.us_per_byte_high
    assert inside >= 54, inside


def test_plain_least_squares_would_fail_here():
    """Errors must be relative: if the largest message dominates a fit, its latency is wrong."""
    rng = np.random.default_rng(1)
    sizes = np.array(SIZES[:10], float)
    times = np.array([np.median(samples(rng, size)) for size in sizes])
    noisy = times.copy()
    noisy[-1] *= 1.5  # one wrong median among the largest
    latency, _ = robust_line(sizes, noisy)
    assert latency == pytest.approx(SMALL[0], rel=0.03)
    slope, intercept = np.polyfit(sizes, noisy, 1)
    assert abs(intercept / SMALL[0] - 1) > 0.03
    assert slope > 0


def test_no_parameter_is_negative():
    sizes = np.array([1000.0, 2000, 4000, 8000])
    latency, per_byte = robust_line(sizes, sizes**1.3)
    assert latency == 0
    assert per_byte > 0
    latency, per_byte = robust_line(sizes, 100 / sizes)
    assert latency > 0
    assert per_byte == 0


def test_one_line_gets_no_break():
    sizes = np.array(SIZES, float)
    rng = np.random.default_rng(3)
    assert best_breaks(sizes, (2 + 1e-3 * sizes) * (1 + 0.005 * rng.standard_normal(20))) == ()


def test_the_held_out_error_sees_a_curve_that_no_line_follows():
    sizes = np.array(SIZES, float)
    straight = held_out(sizes, np.array([truth(size) for size in SIZES]))
    crooked = held_out(sizes, np.where(np.arange(20) % 2, 1.0, 2.0) * (5 + 1e-3 * sizes))
    assert straight[0] < 0.01 < 0.3 < crooked[0]
    assert held_out(sizes[:4], sizes[:4]) == (None, None)


def test_held_out_sizes_lie_between_the_fitted_ones():
    chosen = held_out_sizes(SIZES, 8)
    assert len(chosen) == 8
    assert not set(chosen) & set(SIZES)
    assert all(SIZES[0] < size < SIZES[-1] and size % 8 == 0 for size in chosen)
    assert len(held_out_sizes(SIZES, 100)) == len(SIZES) - 2  # nothing fits between 8 and 16
    assert held_out_sizes((0,), 8) == ()


# --- rows of bench.interconnect


def row(case, size, times, **fields):
    """A row of the first launch."""
    pair = case in ("latency", "bandwidth", "bidirectional")
    return (
        bench_rows.row(case, size=size, times=times)
        | {"axis": "pair" if pair else "world", "launch": 0}
        | fields
    )


def test_the_quietest_round_of_each_launch_counts():
    rng = np.random.default_rng(5)
    rows = [
        row("all-reduce", size, samples(rng, size, shift=shift), launch=launch)
        for size in SIZES
        for launch in range(3)
        for shift in (4.0, 1.0, 2.5)
    ]
    kept = quietest(rows)
    assert len(kept) == 3 * len(SIZES)
    (curve,) = curves(kept)
    assert (curve.operation, curve.link, curve.ranks) == ("all-reduce", "same node", 2)
    assert curve.estimate(64).seconds * 1e6 == pytest.approx(truth(64), rel=0.03)


def test_bare_rows_and_rows_of_busy_groups_are_not_fitted():
    base = [row("all-reduce", size, [5.0] * 9) for size in SIZES[:4]]
    others = [
        one | change | {"median_us": 1.0, "left_ns": [[1e3, 1e3]] * 9}
        for one in base
        for change in ({"via": "mpi4py"}, {"mode": "together"})
    ]
    assert curves(base + others) == curves(base)
    assert curves(base[:2]) == []  # two sizes make no line


def test_a_barrier_has_one_time():
    (curve,) = curves([row("barrier", 0, [4.0, 5.0, 9.0], launch=launch) for launch in range(2)])
    assert curve.estimate(0).seconds == pytest.approx(5e-6)
    assert not curve.estimate(0).extrapolated


def test_factors_and_overhead():
    rows = [
        row("bandwidth", 1 << 20, [100.0], algbw_GBps=10.0),
        row("bidirectional", 1 << 20, [150.0], algbw_GBps=14.0),
        row("bandwidth", 8, [1.0], algbw_GBps=1.0),
        row("bidirectional", 8, [1.0], algbw_GBps=9.0),
    ]
    (factor,) = duplex(rows)
    assert (factor.link, factor.factor) == ("same node", pytest.approx(0.7))
    rows = [
        row("latency", 8, [4.0]),
        row("latency", 8, [2.5], via="mpi4py"),
        row("latency", 1 << 20, [90.0]),
        row("latency", 1 << 20, [10.0], via="mpi4py"),
    ]
    assert overhead(rows) == pytest.approx(0.75)
    assert overhead(rows[:1]) is None
    rows = [
        row("all-reduce", 64, [time], mode=mode, axis="dp", ranks=ranks)
        for mode, time in (("alone", 10.0), ("together", 17.0))
        for ranks in ([0, 2], [1, 3])
    ]
    (one,) = contention(rows)
    assert (one.operation, one.axis, one.factor) == ("all-reduce", "dp", pytest.approx(1.7))


def test_contention_is_within_a_launch():
    """A launch that is slower as a whole does not have more contention."""
    (one,) = contention(
        [
            row("all-reduce", 64, [slow * time], mode=mode, axis="dp", launch=launch)
            for launch, slow in enumerate((3.0, 1.0, 1.0))
            for mode, time in (("alone", 10.0), ("together", 17.0 + launch))
        ]
    )
    assert one.factor == pytest.approx(1.8)


def test_the_verdict_is_by_the_median_of_absolute_errors():
    def lines(what, errors):
        return [{"what": what, "ranks": 2, "link": "same node", "error": error} for error in errors]

    verdicts = judge(
        [
            *lines("latency", (-0.3, 0.09, 0.01)),
            *lines("all-reduce", (-0.12, 0.11)),
            *lines("step dp=2", (0.16, 0.14, -0.149)),
            *lines("stage-chain 1f1b", (0.9,)),
        ]
    )
    assert [one["verdict"] for one in verdicts] == ["kept", "NOT KEPT", "kept", "information"]
    assert verdicts[0]["largest_error"] == 0.3
    both = [*lines("latency", (0.01,)), *lines("latency", (0.5,))]
    both[1]["ranks"] = 4
    assert [one["verdict"] for one in judge(both)] == ["kept", "NOT KEPT"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_reduce_formulas_in_the_limits(ranks):
    """The formulas by hand, for messages of 3 us + n/1000 and sums of n/500."""
    logs, n = {2: 1, 4: 2, 8: 3}[ranks], 8000.0
    found = all_reduce_models(lambda size: 3 + size / 1000, lambda size: size / 500, n, ranks)
    moved = (ranks - 1) / ranks * n
    assert found["ring"] == pytest.approx(2 * (ranks - 1) * 3 + 2 * moved / 1000 + moved / 500)
    assert found["recursive doubling"] == pytest.approx(logs * (3 + n / 1000 + n / 500))
    assert found["Rabenseifner"] == pytest.approx(2 * logs * 3 + 2 * moved / 1000 + moved / 500)
