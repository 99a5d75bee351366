"""On simulated traces the right rank, link, cause and share are named, and only planted ones."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from planted_delays import Run, Simulator
from short_runs import FAULTS
from trace_cases import blocking, record, span, trace

from mpipar.study.trace import causes, findings, pop, segments, waits
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
    stage = late_run.grids[run.rank].group_rank("pp")
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
    plain = causes.Comparison.more
    monkeypatch.setattr(
        causes.Comparison,
        "more",
        lambda self, theirs, own, length: plain(self, theirs, 0 * own, length),
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
    ends = [(0, 1), (1, 0)]
    both = causes.Comparison([causes.Cause("transfer", one, "of attn (cp)") for one in ends])
    found = both.more(np.array([3000, 2300, 0, 0]), np.array([0, 2738, 0, 0]), 1000.0)
    assert found == pytest.approx([566, 434, 0, 0], abs=1)


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
    assert late_run.grids[cause.ranks[0]].group_rank("pp") == place


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


def test_a_wait_for_a_waiting_rank_is_charged_to_the_root():
    """Rank 3 loads data late. Its tp mate waits for it, and the stage before for both."""
    run, _ = case(PP + TP, "data")
    _, late = analysed(run)
    longest = max(
        (call for call in late.waits.calls[0] if call.wait_ns), key=lambda call: call.wait_ns
    )
    assert longest.late == 2
    assert late.causes.reason(longest) == "rank 3: data loading"


# --- A slow link is named with what it costs; healthy links are silent, also on a noisy machine


GROUPS = [(DP, ("dp", (0, 1))), (TP, ("tp", (0, 1))), (DP + PP, ("dp", (2, 3)))]
MESSAGES = [
    (layout, ("pp", ranks))
    for layout, pairs in (
        (PP, [(0, 1), (1, 0)]),
        (DP + PP, [(0, 2), (3, 1)]),
        (PP + TP, [(0, 2), (3, 1)]),
        (PP4, [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)]),
    )
    for ranks in pairs
]


def check_links(layout, link, schedule, steps_late):
    """The link is the one finding, and it costs what the step is longer than without it."""
    plain = Run(layout, schedule=schedule)
    base, _ = analysed(plain)
    run = replace(plain, fault="link", link=link, delay=steps_late * base.step_ms)
    late = Simulator(run)
    (finding,) = Analysis(late.trace).findings
    axis, ranks = link
    name = " -> ".join(map(str, ranks)) if axis == "pp" else ", ".join(map(str, ranks))
    assert finding.kind == "slow link"
    assert finding.text.startswith(f"{axis} {'link' if axis == 'pp' else 'group'} {name}: ")
    assert finding.lost_ms / late.step_ms == pytest.approx(
        1 - base.step_ms / late.step_ms, abs=POINTS
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("layout", "link"), GROUPS + MESSAGES, ids=str)
def test_a_slow_link_is_named(layout, link, schedule):
    check_links(layout, link, schedule, 1)


def test_small_transfers_that_nobody_waited_for_do_not_make_a_link_slow():
    """The large sums of both groups are equally fast; one group also has small hidden ones."""

    def sums(group):
        made = []
        for step in range(6):
            at = 100 * step
            made += [
                record(
                    "all_reduce",
                    "grads.block",
                    "dp",
                    at + 5 * i,
                    at + 60,
                    at + 60,
                    payload_bytes=200_000,
                    step=step + 1,
                )
                for i in range(8)
                if group == 0
            ]
            made.append(
                record(
                    "all_reduce",
                    "grads.embed",
                    "dp",
                    at + 70,
                    at + 70,
                    at + 80,
                    payload_bytes=4 << 20,
                    step=step + 1,
                )
            )
        return made

    groups = [{"dp": (0, 1), "world": (0, 1, 2, 3)}] * 2 + [
        {"dp": (2, 3), "world": (0, 1, 2, 3)}
    ] * 2
    run = trace([sums(0), sums(0), sums(1), sums(1)], end=600, groups=groups, steps=6)
    found = findings.measured(waits.find(run), [[]] * 4)
    assert [len(link.lengths) for link in found] == [6, 6]
    assert [link.size for link in found] == [4 << 20] * 2
    assert "slow link" not in [one.kind for one in Analysis(run).findings]


@pytest.mark.parametrize("layout", [DP + PP, PP + TP, PP4], ids=str)
def test_a_replay_with_all_transfers_is_the_trace(layout):
    simulator, analysis = analysed(Run(layout, fault="link", link=("pp", (0, 1)), delay=50))
    ends = pop.replay(simulator.trace, analysis.waits, lambda call: call.transfer_ns)
    assert max(ends) == simulator.trace.end


class Noisy(Simulator):
    """Work varies by a sixth and links by half a millisecond; of both, some takes 5 ms longer."""

    def _longer(self, mean_ms):
        rare = self.random.expovariate(1 / 5) if self.random.random() < 0.03 else 0
        return self.random.expovariate(1 / mean_ms) + rare

    def _work(self, rank, length, extra=0.0):
        return super()._work(rank, length, extra + self._longer(0.15 * max(length, 0.1)))

    def _wire_ms(self):
        return super()._wire_ms() + self._longer(0.5)


def check_silence(layout, schedule, seeds):
    for seed in seeds:
        found = Analysis(Noisy(Run(layout, schedule=schedule, seed=seed)).trace)
        assert [one.text for one in found.findings if one.kind == "slow link"] == []


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("layout", [DP + PP, PP + TP, PP4], ids=str)
def test_noise_is_no_slow_link(layout, schedule):
    check_silence(layout, schedule, range(2))


def by_hand(arrivals, waits_from=0):
    """The slow links of steps of 110 ms, in which a message arrives after some ms.

    After sending, the sender computes for 40 ms. The receiver then has work for 60. Then both meet.
    """
    records, passes = ([], []), []
    for step, arrival in enumerate(arrivals):
        now, done = 110 * step, 110 * step + arrival + 60
        facts = {"step": step + 1, "payload_bytes": 8192}
        records[0].append(record("send", "activations", "pp", now, now, now, peer=1, **facts))
        records[1].append(
            record(
                "recv", "activations", "pp", now, now + waits_from, now + arrival, peer=0, **facts
            )
        )
        passes.append(span("F", now, now + 40, step=step + 1))
        for own, came in zip(records, (now + 40, done), strict=True):
            own.append(record("all_reduce", "step.norm", "world", came, came, done))
    made = trace(records, [passes, []], end=110 * len(arrivals), steps=len(arrivals))
    found = waits.find(made)
    return findings.slow_links(made, found, segments.of_trace(made, found))


def test_a_message_that_stood_still_until_the_sender_was_done_shows_nothing(monkeypatch):
    assert by_hand([40.5] * 6) == []
    assert len(by_hand([42] * 6)) == 1
    monkeypatch.setattr(findings, "AFTER_NS", 0)  # the broken twin blames the link
    assert len(by_hand([40.5] * 6)) == 1


# --- a slow rank


def found_in(run):
    return {finding.kind: finding for finding in Analysis(run).findings}


def by_hand_findings(slow_steps, steps=3):
    """Three ranks of one stage: rank 1 takes 20 ms instead of 10 in some steps."""
    spans = [[span("F", 100 * step, 100 * step + (20 if (i, step) in slow_steps else 10),
                   step=step + 1) for step in range(steps)] for i in range(3)]  # fmt: skip
    return trace([[]] * 3, spans, end=100 * steps, steps=steps)


def test_a_rank_that_is_slower_than_its_stage_in_every_step_is_named():
    finding = found_in(by_hand_findings({(1, 0), (1, 1), (1, 2)}))["slow rank"]
    assert finding.text == (
        "rank 1 on host1 computes 20.0 ms per step, the others of its stage 10.0 ms"
    )
    assert finding.lost_ms == pytest.approx(10)


def test_a_slow_rank_beside_a_stage_without_blocks_is_named():
    """Stage 0 has the embedding alone, whose FLOPs are 0."""

    class Light(Simulator):
        def _pass(self, rank, instr):
            if self.stage_layers[instr.stage]:
                yield from super()._pass(rank, instr)
            else:
                self._span(instr.kind, rank, self._work(rank, 0.2), instr.stage, instr.mb)

    run = Light(Run((("pp", 3),), stage_layers=(0, 2, 2), fault="F", rank=1, delay=200.0)).trace
    finding = found_in(run)["slow rank"]
    assert "rank 1 on host1 slow" in finding.text
    assert finding.lost_ms == pytest.approx(200, rel=0.05)


def test_no_rank_is_blamed_where_ranks_share_cores():
    run = by_hand_findings({(1, 0), (1, 1), (1, 2)})
    for rank in run.ranks:
        rank.host, rank.cores = "host", (0, 1)
    assert found_in(run) == {}


def test_once_may_be_chance():
    assert found_in(by_hand_findings({(1, 0), (1, 2)})) == {}
    one = by_hand_findings({(1, 0)}, steps=1)
    assert found_in(one) == {}
    assert one.remarks() == [
        "one step is traced: what is slow in every step shows only with several"
    ]
