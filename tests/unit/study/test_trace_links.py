"""A slow link is named with what it costs; healthy links are silent, also on a noisy machine."""

from dataclasses import replace

import pytest
from planted_delays import Run, Simulator
from test_trace_causes import DP, POINTS, PP, PP4, TP, analysed
from trace_cases import record, span, trace

from mpipar.study.trace import links, pop, segments, waits
from mpipar.study.trace.analysis import Analysis

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


def check(layout, link, schedule, steps_late):
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
    check(layout, link, schedule, 1)


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
    found = links.measured(waits.find(run), [[]] * 4)
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
    return links.slow_links(made, found, segments.of_trace(made, found))


def test_a_message_that_stood_still_until_the_sender_was_done_shows_nothing(monkeypatch):
    assert by_hand([40.5] * 6) == []
    assert len(by_hand([42] * 6)) == 1
    monkeypatch.setattr(links, "AFTER_NS", 0)  # the broken twin blames the link
    assert len(by_hand([40.5] * 6)) == 1
