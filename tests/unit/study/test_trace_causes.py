"""A matrix of planted causes: on simulated traces the right rank, cause and share are named."""

from dataclasses import replace
from functools import cache

import pytest
from planted_delays import Run, Simulator
from trace_cases import blocking, span, trace
from traced_runs import FAULTS

from mpipar.study.trace import causes
from mpipar.study.trace.analysis import Analysis

DP, PP, TP, PP4 = (("dp", 2),), (("pp", 2),), (("tp", 2),), (("pp", 4),)
LAYOUTS = (DP, PP, TP, DP + PP, PP + TP)
POINTS = 0.10  # how far a share may be off


@cache
def analysed(run):
    simulator = Simulator(run)
    return simulator, Analysis(simulator.trace)


def waited_by_rank(analysis):
    return [sum(call.wait_ns for call in own) for own in analysis.waits.calls]


def share_of(late, base, text):
    """(true, charged) share of a cause in all waiting.

    True is by how much the ranks wait longer than without it. The late rank itself waits less.
    """
    with_, without = waited_by_rank(late), waited_by_rank(base)
    true = sum(max(0, one - other) for one, other in zip(with_, without, strict=True)) / sum(with_)
    charged = sum(cost.wait_ns for cause, cost in late.costs.items() if cause.text() == text)
    usual = sum(cost.wait_ns for cause, cost in base.costs.items() if cause.text() == text)
    return true, (charged - usual) / sum(with_)


def case(layout, fault, **values):
    """A run with half a step planted on its last rank, and the same run without it."""
    plain = Run(layout, timed_layers=fault in "FB", **values)
    step_ms = analysed(plain)[0].step_ms
    rank = len(analysed(plain)[0].ranks) - 1
    return replace(plain, fault=fault, rank=rank, delay=step_ms / 2), plain


def check(layout, fault):
    """The planted fault is the first cause, with its share; a slow rank is also the one finding."""
    run, plain = case(layout, fault)
    (late_run, late), (base_run, base) = analysed(run), analysed(plain)
    stage = late_run.grids[run.rank].place("pp")
    words = FAULTS[fault].format(stage=stage, layer="block3.ffn.up")
    text = f"rank {run.rank}: {words}"
    assert next(iter(late.costs)).text() == text
    true, charged = share_of(late, base, text)
    assert charged == pytest.approx(true, abs=POINTS)
    if fault not in "FB":
        assert late.findings == []
        return
    (finding,) = late.findings
    assert finding.kind == "slow rank"
    assert f"rank {run.rank} on host{run.rank}" in finding.text
    assert words in finding.text
    longer = late_run.step_ms - base_run.step_ms
    assert finding.lost_ms / late_run.step_ms == pytest.approx(
        longer / late_run.step_ms, abs=POINTS
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_late_rank_and_its_cause_are_named(layout, fault):
    check(layout, fault)


def test_what_both_ranks_did_is_no_excess(monkeypatch):
    """The broken twin charges all that the late rank has done since they met."""
    plain = causes.Work.more_than
    monkeypatch.setattr(
        causes.Work, "more_than", lambda self, other, length: plain(self, causes.Work(), length)
    )
    analysed.cache_clear()
    with pytest.raises(AssertionError):
        check(DP, "data")
    analysed.cache_clear()


def test_more_work_in_passes_that_are_each_shorter_is_charged_to_all_of_them():
    """Rank 1 computes 12 and 8 ms, rank 0 one pass of 14 ms."""
    late = Analysis(
        trace(
            [[blocking("all_reduce", "a", "world", start, 21)] for start in (14, 20)],
            [[span("F", 0, 14)], [span("F", 0, 12, stage=1), span("F", 12, 20, stage=3)]],
            end=21,
        )
    )
    assert {cause.text(): cost.wait_ns for cause, cost in late.costs.items()} == pytest.approx(
        {"rank 1: forward of stage 1": 3.6e6, "rank 1: forward of stage 3": 2.4e6}
    )


def test_both_directions_of_a_link_are_the_same_work():
    """The other rank's 2.7 ms are as much in one direction as in both."""
    own, other, what = causes.Work(), causes.Work(), "transfer of block*.attn (cp)"
    for ranks, time in (((0, 1), 3000), ((1, 0), 2300)):
        own.add("transfer", what, causes.Cause("transfer", ranks, what), time)
    other.add("transfer", what, causes.Cause("transfer", (1, 0), what), 2738)
    found = own.more_than(other, 1000.0)
    assert sum(found.values()) == pytest.approx(1000)
    assert [found[cause] for cause in own.parts["transfer", what]] == pytest.approx(
        [566, 434], abs=1
    )


@pytest.mark.parametrize("layout", [PP, DP + PP, PP + TP], ids=str)
@pytest.mark.parametrize(
    ("values", "place"), [({"stage_layers": (3, 1)}, 0), ({"vocab_size": 1500}, 1)]
)
def test_a_stage_with_more_work_is_named(layout, values, place):
    late_run, late = analysed(Run(layout, **values))
    even = 3.0 + late_run.head_ms / 4 if "vocab_size" in values else 3.0  # the same work in all
    base_run, _ = analysed(Run(layout, block_ms=even))
    (finding,) = late.findings
    assert finding.kind == "uneven stage"
    assert ("of which the head is" in finding.text) == ("vocab_size" in values)
    assert finding.text.startswith(f"pipeline rank {place} (stage {place}: ")
    lost = (late_run.step_ms - base_run.step_ms) / late_run.step_ms
    assert finding.lost_ms / late_run.step_ms == pytest.approx(lost, abs=POINTS)
    cause = next(iter(late.costs))
    assert cause.kind == "compute"
    assert late_run.grids[cause.ranks[0]].place("pp") == place


@pytest.mark.parametrize("layout", [PP, DP + PP, PP + TP, PP4], ids=str)
@pytest.mark.parametrize("microbatches", [1, 8])
def test_one_active_rank_is_named_with_its_cure(layout, microbatches):
    late_run, late = analysed(Run(layout, schedule="naive", microbatches=microbatches))
    size = late_run.sizes["pp"]
    (finding,) = late.findings
    assert finding.kind == "one active rank"
    assert f"one of {size} pipeline ranks" in finding.text
    bubble = float(finding.text.split("%")[0].removeprefix("bubble ")) / 100
    assert bubble == pytest.approx(1 - 1 / size, abs=POINTS)
    if microbatches > 1:
        better, _ = analysed(Run(layout, schedule="1f1b", microbatches=microbatches))
        lost = late_run.step_ms - better.step_ms
        assert finding.lost_ms / late_run.step_ms == pytest.approx(
            lost / late_run.step_ms, abs=POINTS
        )
    else:
        assert f"cut into {min(16 // late_run.sizes['dp'], 4 * size)} microb" in finding.text


@pytest.mark.parametrize("layout", [*LAYOUTS, PP4, (("dp", 4),)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_a_healthy_run_has_no_finding(layout, schedule):
    for seed in range(2):
        _, analysis = analysed(Run(layout, schedule=schedule, seed=seed))
        assert analysis.findings == []


def test_the_chain_of_waits_ends_at_the_root():
    """Rank 3 loads data late. Its tp mate waits for it, and the stage before for both."""
    run, _ = case(PP + TP, "data")
    _, late = analysed(run)
    longest = max(
        (call for call in late.waits.calls[0] if call.wait_ns), key=lambda call: call.wait_ns
    )
    told = late.causes.chain(longest)
    assert told[-1] == "rank 3: data loading"
    assert told[0].startswith("rank 2 waited for rank 3 (tp block")
