"""The timeline of a trace's page in a real browser: what a hover shows, how fast."""

import pytest
from trace_cases import blocking, busy_trace, span, trace, with_operations
from trace_page import HOOK, example, tooltip

pytestmark = pytest.mark.browser


def test_every_slice_is_found_where_it_is_drawn(opened):
    page = opened(with_operations(busy_trace(ranks=3, barriers=40)))
    assert page.run("return timeline.lanes") == ["spans", "operations", "calls"]
    wrong = page.run("""
        const wrong = [];
        timeline.data.ranks.forEach((rank, r) => {
          for (const lane of timeline.lanes)
            rank[lane].forEach((row, i) => {
              const [top, height] = timeline.lane(r, lane);
              const length = row[1] + (lane === "calls" ? row[2] : 0);
              const hit = timeline.find(timeline.x(row[0] + length / 2), top + height / 2);
              if (!hit || hit.row !== row) wrong.push([r, lane, i]);
            });
        });
        return wrong;
    """)
    assert wrong == []


def test_the_operations_of_layers_have_a_lane_of_their_own(opened):
    """A pass from 2 to 44 ms: its second operation begins at 16 ms."""
    page = opened(with_operations(example()))
    x, y = page.run(f"""
        const box = {HOOK}, [top, height] = timeline.lane(1, "operations");
        return [box.x + timeline.x(20000), box.y + top + height / 2];
    """)
    page.move(x, y)
    assert tooltip(page) == [
        "matmul",
        {
            "layer": "block1.ffn.down",
            "rank": "1, tp1",
            "step": "1, forward, stage 0, microbatch 2",
            "duration": "14.00 ms",
        },
    ]
    shade = page.run(
        f"""
        const [x, y] = arguments, box = {HOOK}, scale = timeline.scale;
        const pixels = timeline.base.getContext("2d").getImageData(
          (x - box.x) * scale, (y - box.y + 9) * scale, 1, 1).data;
        return `rgb(${{[...pixels.slice(0, 3)].join(", ")}})` === timeline.colours.F;
    """,
        x,
        y,
    )
    assert shade, "it is drawn in the colour of its pass"
    assert page.run("return document.getElementById('lanes').textContent") == (
        "lanes of a rank: passes, operations of layers, barriers"
    )
    page = opened(example())
    assert page.run("return timeline.lanes") == ["spans", "calls"]
    page = opened(with_operations(trace([[]], [[span("F", 0, 45)]])))  # one rank alone
    assert page.run("return [timeline.lanes, find('legend').textContent]") == [
        ["spans", "operations"],
        "forward",
    ]


def test_names_cannot_break_out_of_the_page(opened):
    case = trace([[blocking("all_reduce", "</script><b id=x>", "tp", 10, 42)],
                  [blocking("all_reduce", "</script><b id=x>", "tp", 40, 41)]])  # fmt: skip
    page = opened(case)
    assert page.run("return document.getElementById('x')") is None
    assert page.run("return timeline.data.names") == ["</script><b id=x>"]
