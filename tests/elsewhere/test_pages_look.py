"""How the pages look in a real browser: themes, a narrow window, paper, drawings.

MPIPAR_SCREENSHOTS=FOLDER keeps the screenshots, light, dark and narrow. The README's picture is
made by:

    MPIPAR_SCREENSHOTS=docs python -m pytest tests/elsewhere/test_pages_look.py -m slow
"""

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from program import mpipar
from report_cases import config_of, run_folder, told
from test_explorer_page import write_explorer
from trace_cases import pipeline_trace, with_operations
from trace_page import PLACE

from mpipar.study import report
from mpipar.study.trace import html
from mpipar.study.trace.analysis import Analysis

pytestmark = pytest.mark.browser
HOSTILE = "</script><img src=x onerror=window.hacked=1>"
# By then the effects of a change of the window or the theme are drawn.
FRAME = "return new Promise(done => requestAnimationFrame(() => setTimeout(done, 80)))"


def of_trace(folder, case=None):
    """The page of a trace with operations of layers and a pipeline, or of another one."""
    html.write(Analysis(case or with_operations(pipeline_trace())), folder / "trace.html")
    return folder / "trace.html"


def of_run(folder, name="run", steps=40, **changes):
    """The page of a run of made-up numbers; what users type in it is hostile."""
    run = run_folder(folder, steps, name, log=f"{HOSTILE}\nlast line\n")
    report.write(run, config_of("--data", HOSTILE), told(**changes), lambda text: None)
    return run / "report.html"


PAGES = {"trace": of_trace, "report": of_run, "explorer": write_explorer}
each_page = pytest.mark.parametrize("write", PAGES.values(), ids=PAGES)


@pytest.fixture
def shown(window, tmp_path):
    """Open the page that a function writes; afterwards the console must be empty."""

    def load(write, **options):
        window.open(write(tmp_path, **options))
        window.run("return typeof ready === 'undefined' || ready")
        window.run(FRAME)
        return window

    window.prefer("light")
    window.resize(1440, 1000)
    window.console()
    yield load
    window.prefer("light")
    window.resize(1440, 1000)
    assert window.console() == []


@pytest.fixture
def pictures(tmp_path):
    """The folder of the screenshots, which are kept for a person to look at."""
    folder = Path(os.environ.get("MPIPAR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@each_page
def test_nothing_is_fetched_and_both_themes_are_drawn(write, shown, pictures):
    page, shades = shown(write), []
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.run(FRAME)
        path = pictures / f"{write.__name__}-{theme}.png"
        page.picture(path)
        assert path.stat().st_size > 20_000, "an empty picture"
        shade = page.run("return getComputedStyle(document.body).backgroundColor")
        shades.append(int(re.search(r"\d+", shade)[0]))
    assert shades[0] > 200 > 80 > shades[1]
    page.prefer("light")
    for expected in ("light", "dark", "system"):
        page.click("#theme")
        assert page.run(
            "return [find('theme').textContent, document.documentElement.dataset.theme ?? 'system']"
        ) == [f"theme: {expected}", expected]


@each_page
def test_nothing_sticks_out_of_a_narrow_window(write, shown, pictures):
    page = shown(write)
    page.resize(480, 900)
    page.run(FRAME)
    page.picture(pictures / f"{write.__name__}-narrow.png")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


# --- the page of a trace


def test_the_timeline_follows_the_theme(shown, pictures):
    page, shades = shown(of_trace), {}
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.run(FRAME)
        shades[theme] = page.run("""
            const copy = document.createElement("canvas").getContext("2d");
            copy.drawImage(timeline.base, 0, 0);
            return copy.getImageData(4, 4, 1, 1).data[0];
        """)
        page.run("scrollTo(0, 0)")
        page.move(*page.run(PLACE, 1, 1))
        path = pictures / f"trace-{theme}-hover.png"
        page.picture(path, whole=False)
        assert path.stat().st_size > 20_000, "an empty picture"
    assert shades["light"] > 200 > 80 > shades["dark"]


@pytest.mark.slow
def test_the_picture_of_a_report(window, tmp_path, pictures):
    """A real run, pp 2 x tp 2: title, efficiencies, the timeline of one step, and its barriers."""
    result = mpipar(
        "train",
        "--layout",
        "pp=2,tp=2",
        "--d-model",
        192,
        "--steps",
        8,
        "--trace",
        "6:6",
        "--sample-tokens",
        0,
        "--out",
        tmp_path / "run",
        ranks=4,
    )
    assert result.returncode == 0, result.tail()
    window.prefer("light")
    window.resize(1200, 1000)
    window.open(tmp_path / "run" / "report.html")
    end = window.run("return document.getElementById('barriers').getBoundingClientRect().bottom")
    window.picture(pictures / "report.png", height=end + 12)
    window.resize(1440, 1000)
    assert 20_000 < (pictures / "report.png").stat().st_size <= 200 * 1024


def test_paper_is_light_and_shows_the_whole_timeline(shown, tmp_path):
    page = shown(of_trace)
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
    widths = page.run("""
        document.body.style.width = "700px";
        const [plot, canvas] = ["plot", "base"].map(id => find(id).getBoundingClientRect());
        return [plot.width, canvas.width];
    """)
    assert 500 < widths[1] <= widths[0] < 700


def test_a_narrow_window_scrolls_inside_its_cards(shown):
    page = shown(of_run)
    page.resize(480, 900)
    tables = page.run("""
        return [...document.querySelectorAll("table")].filter(one => one.offsetParent).map(one => [
          one.scrollWidth, one.parentElement.clientWidth,
          getComputedStyle(one.parentElement).overflowX]);
    """)
    assert tables
    assert any(width > room for width, room, _ in tables)
    assert all(width <= room or overflow == "auto" for width, room, overflow in tables)


@pytest.mark.parametrize("width", [420, 1440])
def test_times_of_the_ruler_do_not_overlap(shown, width):
    page = shown(of_trace, case=pipeline_trace())
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
    for texts in labels:
        assert len(texts) >= 2
        assert all(end < start for (_, end, _), (start, _, _) in pairwise(texts))
        assert texts[-1][1] <= width


# --- the page of a run


def test_names_are_text(shown):
    page = shown(of_run, name="<b>run", environment=[("command", HOSTILE)])
    assert page.run("return [window.hacked ?? 0, document.images.length]") == [0, 0]
    assert page.run("return document.querySelector('h1').textContent").startswith("<b>run: dp 1")
    assert page.run("return document.querySelector('#log pre').textContent") == (
        f"{HOSTILE}\nlast line\n"
    )
    assert page.run("return find('traced').hidden")


def test_the_pointer_tells_values_of_the_nearest_step(shown):
    page = shown(of_run)
    notes = "return [...document.querySelectorAll('#curves .legend')].map(one => one.textContent)"
    before = page.run(notes)
    assert before[0] == "training 0.79057 at step 40held out 0.94868 at step 40"
    assert before[1] == "learning rate 0.04 at step 40"
    x, y = page.run("""
        const svg = document.querySelector("#curves svg"), box = svg.getBoundingClientRect();
        return [box.x + MARGIN.left + 2, box.y + box.height / 2];
    """)
    page.move(x, y)
    assert page.run(notes)[0] == "training 5 at step 1held out 1.8974 at step 10"
    page.move(5, 5)
    assert page.run(notes) == before


@pytest.mark.parametrize("width", [480, 1440])
def test_letters_of_curves_keep_their_size(shown, width):
    page = shown(of_run)
    page.resize(width, 900)
    page.run(FRAME)
    for box, width_of_svg in page.run("""
        return [...document.querySelectorAll("#curves svg")].map(one => [
          one.viewBox.baseVal.width, one.getBoundingClientRect().width]);
    """):
        assert abs(box - width_of_svg) < 2


def test_paper_has_the_curves_and_the_tables_but_not_the_log(shown, tmp_path):
    page = shown(of_run)
    page.prefer("dark")
    (tmp_path / "run.pdf").write_bytes(page.paper())
    page.prefer("light", media="print")
    hidden = page.run("return ['log', 'curves', 'tables'].map(id => !find(id).offsetHeight)")
    assert hidden == [True, False, False]


def test_one_step_is_a_dot(shown):
    page = shown(of_run, steps=1)
    assert page.run("return document.querySelectorAll('#curves circle[r=\"3\"]').length") == 5


# --- the schedule explorer


@pytest.mark.slow
def test_paper_shows_whole_timelines(shown, pictures):
    page = shown(write_explorer)
    (pictures / "explorer.pdf").write_bytes(page.paper())
    page.prefer("light", media="print")
    wide = page.run("""
        document.body.style.width = "700px";
        return [...document.querySelectorAll(".panel svg")].map(one =>
          one.getBoundingClientRect().width);
    """)
    assert all(300 < one <= 700 for one in wide), wide
