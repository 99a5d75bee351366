"""How the pages look in a real browser: themes, a narrow window, paper, drawings.

MPIPAR_SCREENSHOTS=FOLDER keeps the screenshots, light, dark and narrow. The README's picture is
made by:

    MPIPAR_SCREENSHOTS=docs python -m pytest tests/elsewhere/test_pages_look.py -m slow
"""

import os
import re
from pathlib import Path

import pytest
from program import mpipar
from report_cases import config_of, run_folder, told
from test_explorer_page import write_explorer
from trace_cases import pipeline_trace, with_operations

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


# --- the page of a trace


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
    assert (pictures / "report.png").stat().st_size > 20_000  # not blank


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
