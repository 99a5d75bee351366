"""Comparing two runs: each planted slowdown is named first, and noise is not named."""

from random import Random

import pytest
from in_process import assert_refused, printed
from trace_cases import MS, blocking, record, span, trace, write_trace

from mpipar.commands import compare
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.study.trace import causes, comparison
from mpipar.study.trace.analysis import Analysis

STEPS = 7
PLANTED_MS = 6.0
# The parts of a step of the run below, in ms. Rank 1 alone computes `late` before the barrier,
# and its backward is shorter by `short`.
PARTS = {
    "data": 2,
    "forward": 10,
    "late": 0,
    "transfer": 3,
    "backward": 20,
    "short": 10,
    "message": 4,
    "opt": 5,
}


def run(seed, num_steps=STEPS, **longer):
    """Two ranks: data, forward, a barrier, backward, a message 0 -> 1, a barrier, the optimizer.

    Each part is longer than PARTS says: by a random share up to 2 %, and by `longer` in ms.
    """
    random, clock = Random(seed), [0.0, 0.0]
    steps, records, spans = [], [[], []], [[], []]

    def work(place, kind, length, step):
        spans[place].append(span(kind, clock[place], clock[place] + length, step=step))
        clock[place] += length

    def meet(name, axis, transfer, step):
        done = max(clock) + transfer
        for place in (0, 1):
            records[place].append(blocking("all_reduce", name, axis, clock[place], done, step=step))
            clock[place] = done

    for step in range(1, num_steps + 1):
        begin = clock[0]
        parts = {
            name: (ms + longer.get(name, 0)) * random.uniform(1, 1.02) for name, ms in PARTS.items()
        }
        for place in (0, 1):
            work(place, "data", parts["data"], step)
            work(place, "F", parts["forward"] + parts["late"] * place, step)
        meet("block0.ffn.down", "tp", parts["transfer"], step)
        for place in (0, 1):
            work(place, "B", parts["backward"] - parts["short"] * place, step)
        (sent, ready), arrived = clock, max(clock) + parts["message"]
        ends = {"tag": step, "step": step}
        records[0].append(record("send", "activations", "pp", sent, sent, sent, peer=1, **ends))
        records[1].append(
            record("recv", "activations", "pp", begin, ready, arrived, peer=0, **ends)
        )
        clock[1] = arrived
        meet("step.norm", "world", 0, step)
        for place in (0, 1):
            work(place, "opt", parts["opt"], step)
        steps.append((step, round(begin * MS), round(clock[0] * MS)))
    made = trace(records, spans)
    for one in made.ranks:
        one.steps = list(steps)
    made.metrics.extend(
        {"step": step, "loss": 1.0, "step_seconds": (end - start) * 1e-9}
        for step, start, end in steps
    )
    return Analysis(made)


# The part that takes longer, the causes that must come first, and their share of the planted time.
# The share is a mean over two ranks, of which one or both lose the time.
@pytest.mark.parametrize(("part", "causes", "share"), [
    ("data", {"data loading"}, 1), ("forward", {"compute: forward of stage 0"}, 1),
    ("backward", {"compute: backward of stage 0"}, 1), ("opt", {"optimizer"}, 1),
    ("transfer", {"transfer over tp"}, 1),
    ("late", {"compute: forward of stage 0", "waiting for rank 1"}, 0.5),
    ("message", {"transfer over pp", "waiting for rank 1"}, 0.5),
])  # fmt: skip
def test_a_planted_slowdown_comes_first(part, causes, share):
    before, after = run(1), run(2, **{part: PLANTED_MS})
    first = comparison.items(before, after)[: len(causes)]
    assert {one.what for one in first} == causes
    for one in first:
        assert one.verdict == "slower"
        assert one.ms == pytest.approx(share * PLANTED_MS, abs=0.5)
    step, *_ = comparison.step_time(before, after)
    assert step.verdict == "slower"
    assert step.ms == pytest.approx(PLANTED_MS, abs=1)
    back, *_ = comparison.step_time(after, before)
    assert back.verdict == "faster"


def test_from_two_steps_nothing_is_concluded(capsys):
    assert compare.print_step(run(1, 2), run(2, 2, late=10 * PLANTED_MS)) == ""
    assert "within the spread" not in capsys.readouterr().out


def test_who_was_late_and_with_what_is_named():
    waited = comparison.waited_for(run(1), run(2, late=PLANTED_MS))[0]
    assert waited.what == "rank 1: forward of stage 0"
    assert waited.ms == pytest.approx(PLANTED_MS, abs=0.5)


def test_waiting_for_a_message_is_the_bubble():
    """Rank 1's backward gets shorter: it waits for rank 0 instead, and no step gets faster."""
    before, after = run(1), run(1, short=5)
    changes = comparison.items(before, after)
    assert changes[0].what == "bubble: waiting for a message of the pipeline"
    assert changes[0].ms == pytest.approx(2.5, abs=0.1)  # of one of two ranks
    assert changes[-1].what == "compute: backward of stage 0"
    assert changes[-1].ms == pytest.approx(-2.5, abs=0.1)
    assert comparison.step_time(before, after)[0].verdict == ""


def test_noise_is_not_blamed():
    before, after = run(1), run(2)
    assert comparison.step_time(before, after)[0].verdict == ""
    assert [one for one in comparison.items(before, after) if abs(one.ms) > 0.5] == []


@pytest.mark.parametrize(("before", "after", "verdict"), [
    ([1.0, 1.0], [9.0, 9.0, 9.0], ""), ([1.0, 1.0, 1.1], [9.0, 9.0, 9.0], "slower"),
    ([9.0, 9.0, 9.0], [1.0, 1.0, 1.1], "faster"), ([1.0, 5.0, 9.0], [2.0, 6.0, 9.5], ""),
])  # fmt: skip
def test_only_more_than_the_spread_is_a_verdict(before, after, verdict):
    found = comparison.change("step", before, after)
    assert (found.before[1], found.after[1], found.verdict) == (before[1], after[1], verdict)


def test_the_work_grows_as_the_steps(monkeypatch):
    """Counted: the pieces of time that items and causes look at, for 10 and for 40 steps."""
    looks = []
    within = causes.Causes._within

    class Counted(list):
        def __iter__(self):
            for one in super().__iter__():
                looks.append(one)
                yield one

    def pieces(*words):
        found = within(*words)
        looks.extend(found)
        return found

    monkeypatch.setattr(causes.Causes, "_within", pieces)
    counts = []
    for num_steps in (10, 40):
        analysis = run(1, num_steps)
        analysis.__dict__["segments"] = [Counted(own) for own in analysis.segments]
        looks.clear()
        comparison.by_item(analysis, True)
        assert analysis.costs
        counts.append(len(looks))
    assert counts[1] <= 4.2 * counts[0]


def test_items_of_a_step_make_up_the_step():
    """Also where time between spans begins in one step and ends in the next."""
    run = trace([[]], [[span("F", 0, 40), span("F", 60, 100, step=2)]], steps=2)
    items = comparison.by_item(Analysis(run), True)
    assert [sum(each) for each in zip(*items.values(), strict=True)] == pytest.approx([50, 50])


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("compared") / "run"
    made.mkdir()
    write_trace(made)
    (made / "config.toml").write_text("d-model = 16\n")
    return made


@pytest.mark.slow
def test_the_command_names_the_slow_rank_and_its_pass(late_runs):
    text = printed("compare", late_runs["none"], late_runs["delay"])
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("cause  "))
    first = {lines[start + 1].split("  ")[0], lines[start + 2].split("  ")[0]}
    assert first == {"compute: forward of stage 0", "waiting for rank 1"}
    assert lines[start + 1].endswith("slower")
    start = next(i for i, line in enumerate(lines) if line.startswith("cause of waiting"))
    assert lines[start + 1].startswith("rank 1: forward of stage 0")
    printed("compare", late_runs["none"], late_runs["delay"], "--check", code=EXIT_CHECK_FAILED)
    printed("compare", late_runs["delay"], late_runs["none"], "--check")


def test_a_run_is_as_fast_as_itself(folder):
    text = printed("compare", folder, folder, "--check")
    assert "B takes 1.00x as long, within the spread: neither slower nor faster" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("words", "code", "message"), [
    (["run"], 2, "the following arguments are required: RUN_B"),
    (["run", "missing"], 65, "missing: no such run folder; record one with"),
    (["run", "."], 65, "this run has no trace; record one with"),
    (["run", "run/config.toml"], 65, "config.toml: no such run folder"),
    (["run", "run", "--steps", "3"], 2, "--steps: mpipar compare does not use it"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(folder, words, code, message):
    base = folder.parent
    words = [word if word.startswith("-") or word.isdigit() else base / word for word in words]
    assert_refused(code, [message], "compare", *words)
