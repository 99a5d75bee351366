"""How a trace's page looks in a real browser: themes, drawings, paper.

MPIPAR_SCREENSHOTS=FOLDER keeps the screenshots, light and dark. The README's picture is made by:

    MPIPAR_SCREENSHOTS=docs python -m pytest tests/test_trace_page_looks.py -m slow
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from program import mpipar
from trace_cases import pipeline_trace, with_operations
from trace_page import PLACE, example

pytestmark = pytest.mark.browser
# By then the effects of a change of the window or the theme are drawn.
FRAME = "return new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"


def test_nothing_is_fetched_and_both_themes_are_drawn(opened, tmp_path):
    page = opened(example())
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    shades = {}
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.run(FRAME)
        shades[theme] = page.run("""
            const copy = document.createElement("canvas").getContext("2d");
            copy.drawImage(timeline.base, 0, 0);
            return [getComputedStyle(document.body).backgroundColor,
                    copy.getImageData(4, 4, 1, 1).data[0]];
        """)
    assert shades["light"][0] != shades["dark"][0]
    assert shades["light"][1] > 200 > 80 > shades["dark"][1]
    page.prefer("light")
    for expected in ("light", "dark", "system"):
        page.click("#theme")
        assert page.run("return document.getElementById('theme').textContent") == (
            f"theme: {expected}")


def test_screenshots_of_both_themes(opened, tmp_path):
    """The whole page and a hover are kept as artefacts for a person to look at."""
    folder = Path(os.environ.get("MPIPAR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page = opened(with_operations(pipeline_trace()))
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.picture(folder / f"trace-{theme}.png")
        page.run("scrollTo(0, 0)")
        page.move(*page.run(PLACE, 1, 1))
        page.picture(folder / f"trace-{theme}-hover.png", whole=False)
        for name in (f"trace-{theme}.png", f"trace-{theme}-hover.png"):
            assert (folder / name).stat().st_size > 20_000, "an empty picture"


@pytest.mark.slow
def test_the_picture_of_the_readme(window, tmp_path):
    """A real run, pp 2 x tp 2: title, efficiencies, and the timeline of one step."""
    folder = Path(os.environ.get("MPIPAR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    result = mpipar("train", "--layout", "pp=2,tp=2", "--d-model", 192, "--steps", 8, "--trace",
                    "6:6", "--sample-tokens", 0, "--out", tmp_path / "run", ranks=4)
    assert result.returncode == 0, result.tail()
    window.prefer("light")
    window.resize(1200, 1000)
    window.open(tmp_path / "run" / "report.html")
    window.run("find('run').hidden = find('tables').hidden = true")
    end = window.run("return document.getElementById('trace').getBoundingClientRect().bottom")
    window.picture(folder / "report.png", height=end + 12)
    window.resize(1440, 1000)
    assert 20_000 < (folder / "report.png").stat().st_size <= 200 * 1024


def test_the_pipeline_is_drawn_as_measured_and_as_simulated(opened):
    """The trace is made by the simulator: both drawings and their figures must be the same."""
    page = opened(pipeline_trace("zb-h1", ranks=4, microbatches=8))
    drawn = page.run("""
        const texts = [...document.querySelectorAll("#pipeline text")].map(one => one.textContent);
        const boxes = [...document.querySelectorAll("#pipeline rect")].filter(one =>
          one.firstElementChild).map(one => [one.firstElementChild.textContent,
            ["x", "width"].map(name => Math.round(one.getAttribute(name))).join()]);
        return [texts, boxes];
    """)
    texts, boxes = drawn
    half = len(boxes) // 2
    assert half == 4 * 8 * 3
    assert boxes[:half] == boxes[half:]
    assert boxes[0][0] == "stage 0 F, microbatch 0: 10.00 ms"
    figures = [text for text in texts if text.startswith("busy")]
    assert figures[:4] == figures[4:]
    assert figures[0] == "busy 89 %, bubble 30.0 ms"  # of 8 * 30 + (4 - 1) * 10 ms
    assert page.run("return document.querySelector('#curves .first p').textContent") == (
        "training 0.26316 at step 19")
    assert page.run("return document.getElementById('curves').textContent").endswith(
        "the bands mark the traced steps")
    assert page.run("return document.querySelectorAll('#map .rank').length") == 4


def test_paper_is_light_and_shows_the_whole_timeline(opened, tmp_path):
    page = opened(with_operations(pipeline_trace()))
    page.prefer("dark")
    page.run("""
        window.seen = [];
        const look = () => seen.push(timeline.colours.card);
        addEventListener("beforeprint", look);
        addEventListener("afterprint", look);
    """)
    (tmp_path / "trace.pdf").write_bytes(page.paper())
    assert page.run("return seen") == ["rgb(255, 255, 255)", "rgb(23, 29, 38)"]
    page.prefer("light", media="print")
    shown = page.run("""
        document.body.style.width = "700px";
        const [plot, canvas] = ["plot", "base"].map(id => find(id).getBoundingClientRect());
        return [plot.width, canvas.width];
    """)
    page.prefer("light")
    assert 500 < shown[1] <= shown[0] < 700


def test_a_narrow_window_scrolls_inside_its_cards(opened):
    page = opened(with_operations(pipeline_trace()))
    page.resize(480, 900)
    widths = page.run("return [innerWidth, document.documentElement.scrollWidth,"
                      " document.querySelector('#pipeline svg').getBoundingClientRect().width]")
    tables = page.run("""
        return [...document.querySelectorAll("table")].filter(one => one.offsetParent).map(one => [
          one.scrollWidth, one.parentElement.clientWidth,
          getComputedStyle(one.parentElement).overflowX]);
    """)
    page.resize(1440, 1000)
    assert widths[1] <= widths[0] < 560 <= widths[2]
    assert tables
    assert any(width > room for width, room, _ in tables)
    assert all(width <= room or overflow == "auto" for width, room, overflow in tables)


@pytest.mark.parametrize("width", [420, 1440])
def test_times_of_the_ruler_do_not_overlap(opened, width):
    page = opened(pipeline_trace())
    page.resize(width, 900)
    page.run(FRAME)
    labels = page.run("""
        const found = [], pen = timeline.base.getContext("2d"), plain = pen.fillText;
        const length = timeline.limits[1] - timeline.limits[0];
        pen.fillText = function (text, x, y) {
          if (text.endsWith(" ms")) found.push([x, x + this.measureText(text).width, text]);
          plain.call(this, text, x, y);
        };
        const zooms = [1, 3, 10, 100].map(zoom => {
          found.length = 0;
          timeline.show(timeline.limits[0], timeline.limits[0] + length / zoom);
          return [...found];
        });
        delete pen.fillText;
        return zooms;
    """)
    page.resize(1440, 1000)
    for shown in labels:
        assert len(shown) >= 2
        assert all(end < start for (_, end, _), (start, _, _) in pairwise(shown))
        assert shown[-1][1] <= width
