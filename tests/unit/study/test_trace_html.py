"""The parts of a trace's page; its looks and behaviour are tested in a browser."""

import re
from html import unescape

import pytest
from planted_delays import Run, Simulator
from report_cases import data_of
from trace_cases import blocking, trace

from mpipar.commands.trace import show
from mpipar.run.files.text import harmless
from mpipar.study.trace import html, pop
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
