"""The pages in a real browser: schedule explorer, trace, report. They show what Python says.

MPIPAR_SCREENSHOTS=FOLDER keeps the screenshots, light and dark.
"""

import os
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import browser
import pytest
from report_cases import config_of, run_folder, told
from trace_cases import blocking, busy_trace, pipeline_trace, trace, with_operations

from mpipar.commands import schedule as command
from mpipar.pipeline.check import ScheduleError, check
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.instructions import Instr, Schedule, is_compute
from mpipar.pipeline.schedules.catalog import (
    SCHEDULES,
    make_schedule,
    schedule_problems,
    with_reduce_grad,
)
from mpipar.run.trace import trace_file
from mpipar.study import report
from mpipar.study.schedules import explorer
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.study.trace import html
from mpipar.study.trace.analysis import Analysis

pytestmark = pytest.mark.browser
START = {
    "first": "1f1b",
    "second": "zb-h1",
    "p": 4,
    "m": 8,
    "chunks": 2,
    "share": "worker",
    "overlap": 1,
    "f": 1,
    "i": 1,
    "w": 1,
    "hop": 0,
}
# The middle of a pass of a panel, scrolled into view.
PLACE = """
const [panel, label] = arguments;
const box = [...document.querySelectorAll(`#${panel} .pass`)].find(one =>
  explorer.panels.some(each => each.root.id === panel && each.schedule.label(one.span.pass)
    === label));
box.scrollIntoView({ block: "center" });
const area = box.getBoundingClientRect();
return [area.x + area.width / 2, area.y + area.height / 2];
"""


def write_explorer(folder):
    """The file of a page with the orders of a few counts."""
    data = {
        "title": "Pipeline schedules",
        "unit": "",
        "start": START,
        "own": None,
        "measured": None,
    }
    page = explorer.build(data, explorer.known_orders((2, 4), (4, 8)))
    (folder / "explorer.html").write_text(page)
    return folder / "explorer.html"


@pytest.fixture(scope="module")
def window():
    with browser.browser() as made:
        yield made


HOSTILE = "</script><img src=x onerror=window.hacked=1>"
# By then the effects of a change of the window or the theme are drawn.
FRAME = "return new Promise(done => requestAnimationFrame(() => setTimeout(done, 80)))"


def of_trace(folder, case=None):
    """The page of a trace with operations of layers: of a pipeline, or of another one."""
    html.write(Analysis(with_operations(case or pipeline_trace())), folder / "trace.html")
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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The file of `write_explorer`."""
    return write_explorer(tmp_path_factory.mktemp("explorer"))


@pytest.fixture
def explored(shown, page):
    """The schedule explorer, just loaded."""
    return shown(lambda folder: page)


def load(window, path):
    window.open(path)
    window.run("return ready")
    return window


def costs_json(costs, num_stages):
    """Costs by stage as the page's script takes them."""
    values = {name: [float(value) for value in costs.by_stage(name, num_stages)] for name in "fiw"}
    return values | {"overlap": float(costs.overlap), "hop": float(costs.latency)}


SIMULATE = """
return arguments[0].map(([facts, costs]) => {
  const timeline = simulate(new Schedule(facts), costs);
  return { ...timeline, schedule: null, messages: timeline.messages.length,
           spans: timeline.spans.map(own => own.map(({ pass, start, end }) =>
             [pass.text, start, end])),
           path: criticalPath(timeline).map(({ start, end, message }) =>
             [end - start, message ? costs.hop : 0]) };
});
"""


def test_the_simulation_is_that_of_python(explored):
    """Costs whose sums a float holds exactly: every time must be equal."""
    cases = []
    for name in SCHEDULES:
        for p, m in ((1, 3), (2, 4), (3, 7), (4, 8)):
            if schedule_problems(name, p, m):
                continue
            schedule = make_schedule(name, p, m)
            uneven = tuple((stage * 7 % 5 + 2) / 4 for stage in range(schedule.num_stages))
            cases += [
                (schedule, costs)
                for costs in (
                    Costs(),
                    Costs(2, 1.5, 0.75, overlap=0.75, latency=0.25),
                    Costs(uneven, 1, uneven[::-1], latency=2.5),
                )
            ]
    answers = explored.run(
        SIMULATE,
        [
            (explorer.schedule_facts(schedule), costs_json(costs, schedule.num_stages))
            for schedule, costs in cases
        ],
    )
    assert len(cases) > 100
    for (schedule, costs), found in zip(cases, answers, strict=True):
        expected = simulate(schedule, costs)
        assert found["spans"] == [
            [[str(span.instr), span.start, span.end] for span in own if is_compute(span.instr)]
            for own in expected.spans
        ]
        assert found["makespan"] == expected.makespan
        assert (found["busy"], found["idle"]) == (list(expected.busy), list(expected.global_bubble))
        assert found["bubbleShare"] == pytest.approx(expected.bubble_share, abs=1e-12)
        assert found["peakStash"] == list(expected.peak_stash)
        assert found["sent"] == list(expected.messages)
        assert found["messages"] == sum(expected.messages), "every message arrives"
        assert sum(map(sum, found["path"])) == pytest.approx(expected.makespan)


def spoiled(schedule, chance):
    """The schedule after a few random changes of its passes, with its sums inserted again."""
    programs = [[instr for instr in program if is_compute(instr)] for program in schedule.programs]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        program = chance.choice([one for one in programs if one])
        place = chance.randrange(len(program))
        kind = chance.choice(
            ("near", "near", "far", "other", "lose", "twice", "half", "both", "odd")
        )
        instr = program[place] if kind in ("twice", "both") else program.pop(place)
        if kind == "near":
            program.insert(max(0, place + chance.choice((-2, -1, 1, 2))), instr)
        elif kind in ("far", "twice"):
            program.insert(chance.randrange(len(program) + 1), instr)
        elif kind == "other":
            target = chance.choice(programs)
            target.insert(chance.randrange(len(target) + 1), instr)
        elif kind in ("half", "both") and instr.kind in "BI":
            program.insert(place, instr._replace(kind="I" if instr.kind == "B" else "B"))
        elif kind == "odd" and instr.kind in "FBIW":
            program.insert(place, Instr(instr.kind, instr.stage, instr.mb + 4))
    return replace(
        schedule,
        programs=tuple(with_reduce_grad(program) if program else () for program in programs),
    )


def complaint(schedule: Schedule) -> str:
    """What the proof says; nothing of a schedule that can run."""
    try:
        check(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


def test_the_proof_is_that_of_python_word_for_word(explored):
    chance, cases = random.Random(5), []
    for name in SCHEDULES:
        for p, m in ((2, 4), (3, 6), (4, 8)):
            if not schedule_problems(name, p, m):
                cases += [spoiled(make_schedule(name, p, m), chance) for _ in range(25)]
    texts = explored.run(
        """
        return arguments[0].map(facts => {
          const programs = facts.programs.map(row => row ? row.split(" ").map(readPass) : []);
          return problemsOf(new Schedule({ ...facts, programs }))[0]?.text ?? "";
        });
    """,
        [explorer.schedule_facts(schedule) for schedule in cases],
    )
    expected = [complaint(schedule) for schedule in cases]
    assert texts == expected
    kinds = (
        "needs [0-9]+F[0-9]+, which stands",
        "needs the backward of",
        "which this rank never",
        "deadlock",
        "is not on this rank",
        "has already run",
        "the other form",
        "does not exist",
        "B[0-9]+ .*is missing",
        "W[0-9]+ is missing",
        "^$",
    )
    assert [kind for kind in kinds if not any(re.search(kind, text) for text in expected)] == []


def reads(page, part, panel="first"):
    return page.run(f"return document.querySelector('#{panel} {part}').textContent")


def figures(page):
    """{name of a figure: its values} of the table."""
    rows = page.run(
        "return [...document.querySelectorAll('#figures tr')].map(row =>"
        " [...row.cells].map(cell => cell.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def with_two_passes_swapped(name):
    """The words for a schedule on 4 ranks whose first worker runs F1 before F0."""
    schedule = make_schedule(name, 4, 8)
    first, second, *others = schedule.programs[0]
    swapped = replace(schedule, programs=((second, first, *others), *schedule.programs[1:]))
    before, after = (simulate(one, Costs()).makespan for one in (schedule, swapped))
    assert after > before
    return f"your order can run. The step takes {after}: {after - before} more than before"


def test_a_dragged_pass_is_proved_and_timed(explored):
    page = explored
    assert reads(page, ".verdict").startswith("proved: ")
    assert figures(page)["step"] == ["33", "27"]
    x, y = page.run(PLACE, "first", "B0")  # from 10 to 12
    page.hold(x, y, x - 10.9 * page.run("return explorer.panels[0].drawing.scale"), y)
    assert reads(page, "h2") == "1f1b, your order: 4 workers, 4 stages, 8 microbatches"
    assert reads(page, ".verdict").startswith(
        "schedule 1f1b: rank 0 position 0 (0B0): needs 0F0, which stands at 1\n"
    )
    assert page.run(
        "return [...document.querySelectorAll('#first .unable')].map(one => one.textContent)"
    ) == ["B0"]
    assert page.run("return document.querySelectorAll('#first .lack').length") == 1
    assert figures(page)["step"] == ["-", "27"]
    page.click("#first .undo")
    assert reads(page, ".verdict").startswith("proved: ")
    (x, y), (to_x, to_y) = page.run(PLACE, "first", "F0"), page.run(PLACE, "first", "F1")
    page.hold(x, to_y, to_x + 2, to_y)
    assert reads(page, ".verdict") == with_two_passes_swapped("1f1b")
    page.click("#first .reset")
    x, y = page.run(PLACE, "first", "F0")
    page.hold(x, y, x, y + 38)  # to the next worker
    assert reads(page, ".verdict").startswith(
        "schedule 1f1b: rank 0 position 3 (0B0): needs 0F0, which this rank never runs\n"
    )


def test_the_keyboard_does_what_the_pointer_does(explored, tmp_path):
    page = explored
    page.run("document.querySelector('#second svg').focus()")
    for _ in range(2):
        page.press("\ue014")  # right: the first pass, then the next
    assert reads(page, ".told", "second").startswith("F1: forward, stage 0, microbatch 1, on ")
    page.press("\ue012", held="\ue008")  # left, with Shift
    assert reads(page, ".verdict", "second") == with_two_passes_swapped("zb-h1")
    path = tmp_path / "own.csv"
    path.write_text(page.run("return explorer.panels[1].schedule.csv()"))
    assert [str(instr) for instr in read_csv(path).programs[0][:3]] == ["0F1", "0F0", "0F2"]
    page.press("u")
    assert reads(page, ".verdict", "second").startswith("proved: ")


def choose(page, **values):
    """Set fields of the page, as a reader does."""
    page.run(
        """
        for (const [selector, value] of Object.entries(arguments[0])) {
          const field = document.querySelector(selector.replaceAll("_", " "));
          if (field.type === "checkbox") field.checked = value; else field.value = value;
          field.dispatchEvent(new Event("input", { bubbles: true }));
          field.dispatchEvent(new Event("change", { bubbles: true }));
        }
    """,
        values,
    )


def test_choices_and_costs_change_the_figures(explored):
    page = explored
    choose(page, **{"#p": "2", "#second_.choice": "interleaved", "#second_.chunks_select": "4"})
    assert reads(page, "h2", "second") == "interleaved: 2 workers, 8 stages, 8 microbatches"
    expected = simulate(make_schedule("interleaved", 2, 8, 4), Costs().divided(4))
    assert figures(page)["step"] == ["27", f"{float(expected.makespan):g}"]
    choose(page, **{"#hop": "0.5", "#path": True})
    expected = simulate(make_schedule("1f1b", 2, 8), Costs(latency=0.5))
    assert figures(page)["step"][0] == f"{float(expected.makespan):g}"
    assert page.run("return document.querySelectorAll('#first .message.on-path').length") > 0


def test_a_run_is_drawn_as_measured_and_as_predicted(window, tmp_path, monkeypatch):
    monkeypatch.setattr(explorer, "known_orders", dict)
    monkeypatch.setattr(trace_file, "read", lambda folder: pipeline_trace("zb-h1", 4, 8))
    path = tmp_path / "page.html"
    command.write_explorer(
        SimpleNamespace(from_run="runs/7", from_csv=None, html=str(path)), Costs()
    )
    page = load(window, path)
    assert reads(page, "h2") == "zb-h1: 4 workers, 4 stages, 8 microbatches"
    assert reads(page, "h2", "second").startswith("7, measured: ")
    assert figures(page)["step"] == ["270 ms", "270 ms"]
    assert page.run(
        "return explorer.panels.map(panel => panel.timeline.spans.map(own =>"
        " own.map(span => [span.pass.text, Math.round(span.end)])).join(';'))"
        ".every((text, _, all) => text === all[0])"
    )
    choose(page, **{"#f": "20"})  # a typed cost counts in place of the measured ones
    assert figures(page)["step"] == ["380 ms", "270 ms"]
    assert window.console() == []


# --- the timeline of a trace's page in a real browser: what a hover shows, how fast


def test_every_slice_is_found_where_it_is_drawn(shown):
    page = shown(of_trace, case=busy_trace(ranks=3, barriers=40))
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


def test_names_cannot_break_out_of_the_page(shown):
    case = trace([[blocking("all_reduce", "</script><b id=x>", "tp", 10, 42)],
                  [blocking("all_reduce", "</script><b id=x>", "tp", 40, 41)]])  # fmt: skip
    page = shown(of_trace, case=case)
    assert page.run("return document.getElementById('x')") is None
    assert page.run("return timeline.data.names") == ["</script><b id=x>"]


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


def test_names_are_text(shown):
    page = shown(of_run, name="<b>run", environment=[("command", HOSTILE)])
    assert page.run("return [window.hacked ?? 0, document.images.length]") == [0, 0]
    assert page.run("return document.querySelector('h1').textContent").startswith("<b>run: dp 1")
    assert page.run("return document.querySelector('#log pre').textContent") == (
        f"{HOSTILE}\nlast line\n"
    )
    assert page.run("return find('traced').hidden")
