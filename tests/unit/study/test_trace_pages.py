"""A trace's page and its Chrome JSON; looks and behaviour are tested in a browser."""

import json
import re
from html import unescape

import pytest
from perfetto_rules import check_arrows, check_slices, slices
from planted_delays import Run, Simulator
from report_cases import data_of
from trace_cases import blocking, record, span, trace, with_operations

from mpipar.commands.trace import show
from mpipar.config.text import harmless
from mpipar.study.trace import html, perfetto, pop, waits
from mpipar.study.trace.analysis import Analysis


def case():
    """Two ranks and one barrier."""
    return trace([[blocking("all_reduce", "block0.ffn.down", "tp", 10, 42)],
                  [blocking("all_reduce", "block0.ffn.down", "tp", 40, 41)]])  # fmt: skip


def test_whole_steps_are_left_out_before_slices():
    three_steps = trace([[blocking("all_reduce", "a", "world", 10 * i, 10 * i + 5, step=1 + i // 5)
                        for i in range(15)]] * 2, end=150, steps=3)  # fmt: skip
    data = html.page_data(Analysis(three_steps), most_slices=12)
    assert data["thinned"] == "thinned: 10 of 30 slices are shown; step 1 of 3 steps"
    assert {call[12] for rank in data["timeline"]["ranks"] for call in rank["calls"]} == {1}
    data = html.page_data(Analysis(three_steps), most_slices=29)
    assert data["thinned"] == "thinned: 20 of 30 slices are shown; steps 1 to 2 of 3 steps"
    assert html.page_data(Analysis(three_steps))["thinned"] is None


@pytest.mark.parametrize("schedule", ["1f1b", "naive"])
@pytest.mark.parametrize("steps", [1, 3])
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


@pytest.mark.parametrize(
    "name",
    [
        "<!--<script>",
        "[[DATA]]",
        "[[SCRIPT]]",
        "</script><b>",
        "</title><script>alert(1)</script>",
        "\\1\\g<0>",
        "a\x1b[2J",
    ],
)
def test_no_name_of_a_run_breaks_the_page(name):
    data = html.page_data(Analysis(case()))
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
    case = example()
    path = tmp_path / "trace.json"
    count = perfetto.write(case, waits.find(case), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    return events


def test_slices_nest_and_arrows_lead_from_the_late_to_the_waiting(found):
    check_slices(found)
    leads = sorted((start["name"], start["pid"], end["pid"]) for start, end in check_arrows(found))
    assert leads == [
        ("activations", 0, 1),
        ("block0.ffn.down", 1, 0),
        ("gradients", 1, 0),
    ]


def test_arrows_from_the_call_itself_lead_backwards(found):
    """The broken twin begins an arrow in the late rank's transfer, as Perfetto would join it."""
    for event in found:
        if event["ph"] == "s":
            time, mark = (
                event["ts"],
                next(
                    one
                    for one in found
                    if one["ph"] == "X"
                    and one["tid"] == 3
                    and (one["pid"], one["ts"]) == (event["pid"], event["ts"])
                ),
            )
            event["tid"], event["ts"] = 2, time + mark["dur"]
    with pytest.raises(AssertionError):
        check_arrows(found)


@pytest.mark.parametrize("error", [-3_000, 0, 3_000])
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


def test_an_arrow_outside_its_slice_and_slices_that_cross_are_noticed(found):
    arrow = next(event for event in found if event["ph"] == "f")
    arrow["ts"] += 50_000
    with pytest.raises(AssertionError):
        check_arrows(found)
    wait = next(event for event in found if event["ph"] == "X" and event["cat"] == "wait")
    with pytest.raises(AssertionError):
        check_slices([wait, wait | {"ts": wait["ts"] + wait["dur"] / 2}])


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
    operation = next(event for event in found if event["name"].startswith("block2."))
    assert operation["args"] == {"phase": "F", "step": 1, "stage": 0, "mb": 0}
