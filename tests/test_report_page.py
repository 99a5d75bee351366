"""How the page of a run looks in a real browser: themes, curves, a narrow window, paper.

MPIPAR_SCREENSHOTS=FOLDER keeps the screenshots, light and dark.
"""

import os
from pathlib import Path

import pytest
from report_cases import config_of, run_folder, told

from mpipar.commands import report

pytestmark = pytest.mark.browser
HOSTILE = "</script><img src=x onerror=window.hacked=1>"
FRAME = "return new Promise(done => requestAnimationFrame(() => setTimeout(done, 80)))"


@pytest.fixture
def shown(window, tmp_path):
    """Open the page of a run of made-up numbers; afterwards the console must be empty."""
    def load(name="run", steps=40, **changes):
        folder = run_folder(tmp_path, steps, name, log=f"{HOSTILE}\nlast line\n")
        report.write(folder, config_of("--prompt", HOSTILE), told(**changes), lambda text: None)
        window.open(folder / "report.html")
        return window

    window.prefer("light")
    window.resize(1440, 1000)
    window.console()
    yield load
    window.resize(1440, 1000)
    assert window.console() == []


def test_it_is_drawn_in_both_themes_and_loads_nothing(shown, tmp_path):
    folder = Path(os.environ.get("MPIPAR_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page, shades = shown(), []
    for theme in ("light", "dark"):
        page.prefer(theme)
        page.run(FRAME)
        page.picture(folder / f"report-{theme}.png")
        assert (folder / f"report-{theme}.png").stat().st_size > 20_000, "an empty picture"
        shades.append(page.run("return getComputedStyle(document.body).backgroundColor"))
    page.prefer("light")
    assert shades[0] != shades[1]
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return find('traced').hidden")
    page.click("#theme")
    assert page.run("return document.documentElement.dataset.theme") == "light"


def test_names_are_text(shown):
    page = shown(name="<b>run", environment=[("command", HOSTILE)])
    assert page.run("return [window.hacked ?? 0, document.images.length]") == [0, 0]
    assert page.run("return document.querySelector('h1').textContent").startswith("<b>run: dp 1")
    assert page.run("return document.querySelector('#log pre').textContent") == (
        f"{HOSTILE}\nlast line\n")


def test_the_pointer_tells_values_of_the_nearest_step(shown):
    page = shown()
    page.run(FRAME)
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
def test_letters_keep_their_size_and_nothing_sticks_out(shown, width):
    page = shown()
    page.resize(width, 900)
    page.run(FRAME)
    inner, scroll = page.run("return [innerWidth, document.documentElement.scrollWidth]")
    assert scroll <= inner
    for box, width_of_svg in page.run("""
        return [...document.querySelectorAll("#curves svg")].map(one => [
          one.viewBox.baseVal.width, one.getBoundingClientRect().width]);
    """):
        assert abs(box - width_of_svg) < 2


def test_paper_has_the_curves_and_the_tables_but_not_the_log(shown, tmp_path):
    page = shown()
    page.prefer("dark")
    (tmp_path / "run.pdf").write_bytes(page.paper())
    page.prefer("light", media="print")
    hidden = page.run("return ['log', 'curves', 'tables'].map(id => !find(id).offsetHeight)")
    page.prefer("light")
    assert hidden == [True, False, False]


def test_one_step_is_a_dot(shown):
    page = shown(steps=1)
    page.run(FRAME)
    assert page.run("return document.querySelectorAll('#curves circle[r=\"3\"]').length") == 5
