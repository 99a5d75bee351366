"""What is made of a trace: its page, its Chrome JSON, and the comparison of two runs."""

import json
import re
from html import unescape

import pytest
from in_process import assert_refused, printed
from planted_delays import Run, Simulator
from report_cases import data_of
from trace_cases import (
    blocking,
    check_arrows,
    check_slices,
    record,
    slices,
    span,
    trace,
    with_operations,
    write_trace,
)

from mpipar.commands.trace import show
from mpipar.config.text import harmless
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.study.trace import causes, comparison, html, perfetto, pop, waits
from mpipar.study.trace.analysis import Analysis

# --- the page; looks and behaviour are tested in a browser


def test_of_a_large_trace_the_first_step_is_shown(monkeypatch):
    three_steps = trace([[blocking("all_reduce", "a", "world", 10 * i, 10 * i + 5, step=1 + i // 5)
                        for i in range(15)]] * 2, end=150, steps=3)  # fmt: skip
    monkeypatch.setattr(html, "MOST_SLICES", 29)
    data = html.page_data(Analysis(three_steps))
    assert data["remarks"][0] == "a large trace: step 1 of 3 steps is shown"
    assert {call[12] for rank in data["timeline"]["ranks"] for call in rank["calls"]} == {1}


@pytest.mark.parametrize(("steps", "schedule"), [(1, "1f1b"), (3, "naive"), (3, "1f1b")])
def test_a_pipeline_that_failed_in_its_last_step(steps, schedule, capsys):
    """Tables and page tell all that is known; the bubble is that of the steps before."""
    failed, before = (
        Simulator(Run((("pp", 2),), steps=count, schedule=schedule)).trace
        for count in (steps, steps - 1 or 1)
    )
    for rank in failed.ranks:
        number, start, end = rank.steps[-1]
        cut = (start + end) // 2
        rank.steps, rank.complete = (*rank.steps[:-1], (number, start, cut)), False
        rank.spans = [one for one in rank.spans if one.end_ns <= cut]
        rank.records = [
            one._replace(waited_ns=min(one.waited_ns, cut), done_ns=min(one.done_ns, cut))
            for one in rank.records
            if one.posted_ns < cut
        ]
    show(Analysis(failed))
    text, data = capsys.readouterr().out, html.page_data(Analysis(failed))
    assert "the run failed in the last step that is shown" in text
    assert ("busy share and bubble" in text) == (steps > 1)
    assert data["timeline"]["steps"]
    if steps > 1:
        assert pop.pipeline_bubble(failed) == pop.pipeline_bubble(before)


@pytest.mark.parametrize("name", ["[[DATA]]", "</title><script>alert(1)</script>", "\\1\\g<0>\x1b"])
def test_no_name_of_a_run_breaks_the_page(name):
    data = html.page_data(Analysis(example()))
    page = html.build(data | {"title": name, "remarks": [name]})
    found = data_of(page)
    assert (found["title"], found["remarks"]) == (name, [name])
    title = re.search("<title>(.*?)</title>", page)[1]
    assert unescape(title) == harmless(name)
    assert "<" not in title


# --- the Chrome JSON: slices nest on their rows, arrows begin and end inside slices


def example():
    """A barrier at which rank 1 is 30 ms late, messages: waited for, not, and received late."""
    send = {"peer": 1, "tag": 3, "stage": 0}
    receive = {"peer": 0, "tag": 3, "stage": 1}
    return trace(
        [
            [blocking("all_reduce", "block0.ffn.down", "tp", 10, 42),
             record("send", "activations", "pp", 60, 80, 80, **send),
             record("send", "activations", "pp", 60, 81, 81, **send),
             record("send", "gradients", "pp", 70, 82, 85, **send)],
            [blocking("all_reduce", "block0.ffn.down", "tp", 40, 41),
             record("recv", "activations", "pp", 42, 50, 63, **receive),
             record("recv", "activations", "pp", 64, 66, 66, **receive),
             record("recv", "gradients", "pp", 84, 85, 88, **receive)],
        ],
        [[span("F", 0, 45)], [span("F", 2, 44, stage=1)]],
    )  # fmt: skip


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "trace.json"
    perfetto.write(example(), waits.find(example()), path)
    return json.loads(path.read_text())["traceEvents"]


def test_slices_nest_and_arrows_lead_from_the_late_to_the_waiting(found):
    check_slices(found)
    leads = sorted((start["name"], start["pid"], end["pid"]) for start, end in check_arrows(found))
    assert leads == [
        ("activations", 0, 1),
        ("block0.ffn.down", 1, 0),
        ("gradients", 1, 0),
    ]


def test_a_hop_is_the_time_of_a_message_that_was_waited_for():
    assert pop.hop_ns(example()) == 3_000_000


def test_arrows_from_the_call_itself_lead_backwards(found):
    """The broken twin begins an arrow in the late rank's transfer, as Perfetto would join it."""
    marks = {
        (one["pid"], one["ts"]): one["ts"] + one["dur"]
        for one in found
        if one["ph"] == "X" and one["tid"] == 3
    }
    for event in found:
        if event["ph"] == "s":
            event["tid"], event["ts"] = 2, marks[event["pid"], event["ts"]]
    with pytest.raises(AssertionError):
        check_arrows(found)


@pytest.mark.parametrize("error", [-3_000, 3_000])
def test_no_arrow_leads_backwards_on_clocks_that_differ(error):
    made = Simulator(Run((("dp", 2), ("pp", 2)), fault="data", delay=20.0)).trace
    rank = made.ranks[1]
    rank.records = [
        one._replace(
            posted_ns=one.posted_ns + error,
            waited_ns=one.waited_ns + error,
            done_ns=one.done_ns + error,
        )
        for one in rank.records
    ]
    calls = waits.find(made)
    found = perfetto.events(made, calls)
    check_slices([event for event in found if event.get("cat") != "compute"])
    late = [call for own in calls.calls for call in own if call.wait_ns and call.transfer_ns]
    assert len(check_arrows(found)) == len(late) > 40


def test_operations_of_layers_lie_inside_their_passes():
    case = with_operations(example())
    found = perfetto.events(case, waits.find(case))
    check_slices(found)
    (start, end, name), *operations = slices(found)[1, 0]
    assert name == "1F0"
    assert [name for *_, name in operations] == [
        f"block{part}.ffn.down matmul" for part in range(3)
    ]
    assert (operations[0][0], operations[-1][1]) == (start, end) == (2_000, 44_000)


# --- two runs: each planted slowdown is named first, and noise is not named


TP, PP = (("tp", 2),), (("pp", 2),)
PLANTED_MS = 6.0


def simulated(layout=TP, seed=1, steps=7, **planted):
    """The Analysis of a run, with what is planted in each of its steps."""
    made = Simulator(Run(layout, seed=seed, steps=steps, delay=PLANTED_MS, **planted)).trace
    made.metrics.extend(
        {"step": number, "loss": 1.0, "step_seconds": (end - start) * 1e-9}
        for number, start, end in made.ranks[0].steps
    )
    return Analysis(made)


# What is planted, the causes that must come first, and their share of the planted time: it is a
# mean over two ranks, of which one or both lose the time.
@pytest.mark.parametrize(("layout", "planted", "first", "share"), [
    (TP, {"fault": "data", "rank": 1}, {"data loading", "waiting for rank 1"}, 0.5),
    (TP, {"fault": "F"}, {"compute: forward of stage 0", "waiting for rank 0"}, 0.5),
    (TP, {"fault": "opt"}, {"optimizer"}, 0.5),
    (TP, {"fault": "link", "link": ("tp", (0, 1))}, {"transfer over tp"}, 1),
    (PP, {"fault": "data"}, {"data loading", "bubble: waiting for a message of the pipeline"}, 0.5),
])  # fmt: skip
def test_a_planted_slowdown_comes_first(layout, planted, first, share):
    before, after = simulated(layout), simulated(layout, 2, **planted)
    changes = comparison.items(before, after)[: len(first)]
    assert {one.what for one in changes} == first
    for one in changes:
        assert one.verdict == "slower"
        assert one.ms == pytest.approx(share * PLANTED_MS, abs=0.5)
    step, counts = comparison.step_time(before, after)
    assert (step.verdict, counts) == ("slower", [6, 6])
    assert step.ms == pytest.approx(PLANTED_MS, abs=1)
    assert comparison.step_time(after, before)[0].verdict == "faster"


def test_noise_is_not_blamed():
    before, after = simulated(), simulated(seed=2)
    assert comparison.step_time(before, after)[0].verdict == ""
    assert [one for one in comparison.items(before, after) if abs(one.ms) > 0.5] == []


@pytest.mark.parametrize(("before", "after", "verdict"), [
    ([1.0, 1.0], [9.0, 9.0, 9.0], ""), ([1.0, 1.0, 1.1], [9.0, 9.0, 9.0], "slower"),
    ([9.0, 9.0, 9.0], [1.0, 1.0, 1.1], "faster"), ([1.0, 5.0, 9.0], [2.0, 6.0, 9.5], ""),
])  # fmt: skip
def test_only_more_than_the_spread_is_a_verdict(before, after, verdict):
    found = comparison.change("step", before, after)
    assert (found.before[1], found.after[1], found.verdict) == (before[1], after[1], verdict)


def test_a_stage_is_named_if_both_runs_have_it():
    one, halved = (simulated(layout, fault="F") for layout in (TP, PP))
    assert {"compute: forward", "compute: backward"} < {
        change.what for change in comparison.items(one, halved)
    }


def test_the_work_grows_as_the_steps(monkeypatch):
    """Counted: the pieces of time that items and causes look at, for 10 and for 40 steps."""
    looks, work = [], causes.Causes.work

    class Counted(list):
        def __iter__(self):
            for one in super().__iter__():
                looks.append(one)
                yield one

    def pieces(self, rank, start, end):
        edges, _ = self.pieces[rank]
        looks.extend(edges[(start <= edges) & (edges < end)])
        return work(self, rank, start, end)

    monkeypatch.setattr(causes.Causes, "work", pieces)
    counts = []
    for steps in (10, 40):
        analysis = simulated(steps=steps)
        analysis.__dict__["segments"] = [Counted(own) for own in analysis.segments]
        looks.clear()
        comparison.by_item(analysis)
        assert analysis.costs
        counts.append(len(looks))
    assert counts[1] <= 4.2 * counts[0]


def test_items_of_a_step_make_up_the_step():
    """Also where time between spans begins in one step and ends in the next."""
    run = trace([[]], [[span("F", 0, 40), span("F", 60, 100, step=2)]], steps=2)
    items = comparison.by_item(Analysis(run))
    assert [sum(each) for each in zip(*items.values(), strict=True)] == pytest.approx([50, 50])


def test_a_run_is_as_fast_as_itself(tmp_path):
    write_trace(tmp_path)
    text = printed("compare", tmp_path, tmp_path, "--check")
    assert "B takes 1.00x as long, within the spread: neither slower nor faster" in text
    assert text.endswith("changes, none of them of 0.005 ms\n")  # and no settings without a file
    message = "no run folder with a trace; record one with"
    assert_refused(65, [message], "compare", tmp_path, tmp_path / "missing")


def test_one_file_for_two_views_is_refused(tmp_path):
    words = ["trace", "run", "--html", "x", "--perfetto", "x"]
    assert_refused(2, ["--html and --perfetto both name x"], *words, folder=tmp_path)


def test_check_fails_if_the_second_run_is_slower(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for factor, folder in enumerate(folders, 1):
        folder.mkdir()
        write_trace(folder)
        lines = "".join(f'{{"step": {n}, "step_seconds": {factor}.0}}\n' for n in range(1, 6))
        (folder / "metrics.jsonl").write_text(lines)
    text = printed("compare", *folders, "--check", code=EXIT_CHECK_FAILED)
    assert "B takes 2.00x as long, slower" in text
    printed("compare", *folders[::-1], "--check")
