"""Comparing two runs: each planted slowdown is named first, and noise is not named."""

import json
import shutil
from dataclasses import replace
from random import Random

import pytest
from in_process import assert_refused, printed
from machine_models import machine
from trace_cases import MS, blocking, record, span, trace

from mpipar.commands import compare
from mpipar.commands.compare import config_of, most_flops, work_and_shapes
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.plan import machine_file
from mpipar.plan.machine import settings_of
from mpipar.trace import comparison
from mpipar.trace.analysis import analyse

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
    return [analyse(made)]


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
        assert one.change_ms == pytest.approx(share * PLANTED_MS, abs=0.5)
    step, *_ = comparison.step_time(before, after)
    assert step.verdict == "slower"
    assert step.change_ms == pytest.approx(PLANTED_MS, abs=1)
    back, *_ = comparison.step_time(after, before)
    assert back.verdict == "faster"


def test_a_step_takes_what_it_takes_untraced():
    before, after = run(1), run(1)
    for side, seconds in ((before, 0.05), (after, 0.06)):  # tracing took as long again
        untraced = [{"step": step, "step_seconds": seconds} for step in range(STEPS + 1, 20)]
        side[0].trace.metrics.extend(untraced)
    step, known_from, _ = comparison.step_time(before, after)
    assert (step.before_ms, step.after_ms, step.verdict) == (50, 60, "slower")
    assert known_from == "12 and 12 steps"
    assert "traced" in comparison.step_time(before, run(1))[1]


def test_from_two_steps_nothing_is_concluded(capsys):
    assert compare.print_step(run(1, 2), run(2, 2, late=10 * PLANTED_MS)) == ""
    text = capsys.readouterr().out
    assert "(medians of 2 and 2 traced steps)" in text
    assert "so few steps show no spread" in text
    assert "within the spread" not in text


def test_who_was_late_and_with_what_is_named():
    waited = comparison.waited_for(run(1), run(2, late=PLANTED_MS))[0]
    assert waited.what == "rank 1: forward of stage 0"
    assert waited.change_ms == pytest.approx(PLANTED_MS, abs=0.5)


def test_waiting_for_a_message_is_the_bubble():
    """Rank 1's backward gets shorter: it waits for rank 0 instead, and no step gets faster."""
    before, after = run(1), run(1, short=5)
    changes = comparison.items(before, after)
    assert changes[0].what == "bubble: waiting for a message of the pipeline"
    assert changes[0].change_ms == pytest.approx(2.5, abs=0.1)  # of one of two ranks
    assert changes[-1].what == "compute: backward of stage 0"
    assert changes[-1].change_ms == pytest.approx(-2.5, abs=0.1)
    assert comparison.step_time(before, after)[0].verdict == ""


def test_noise_is_not_blamed():
    before, after = run(1), run(2)
    assert comparison.step_time(before, after)[0].verdict == ""
    assert [one for one in comparison.items(before, after) if abs(one.change_ms) > 0.5] == []


def test_the_parts_of_a_step_make_up_the_step():
    before = run(1)
    for i in range(STEPS):
        total = sum(values[i] for values in comparison.by_item(before[0], True).values())
        _, start, end = before[0].trace.ranks[0].steps[i]
        assert total == pytest.approx((end - start) * 1e-6)


def test_launches_that_differ_by_themselves_are_not_blamed(capsys):
    """Every launch is steady, so its steps show no spread. B's launches lie among A's."""
    before, after = (
        [launch for i, late in enumerate(lates) for launch in run(i, late=late)]
        for lates in ((0, 6, 12), (3, 9, 12))
    )
    assert comparison.step_time(before[:1], after[:1])[0].verdict == "slower"
    step, known_from, _ = comparison.step_time(before, after)
    assert (step.verdict, known_from) == ("", "3 and 3 launches")
    assert {one.verdict for one in comparison.items(before, after)} == {""}
    slow = [launch for i in range(3) for launch in run(i, late=30)]
    assert comparison.step_time(before, slow)[0].verdict == "slower"
    compare.print_step(before, after)
    assert "not shown" not in capsys.readouterr().out


def test_one_launch_shows_no_spread_between_launches(capsys):
    compare.print_step(run(1), run(2) + run(3))
    assert "is not shown: A has 1 and B has 2" in capsys.readouterr().out


def test_two_steps_prove_nothing():
    assert comparison.verdict([1.0, 1.0], [9.0, 9.0, 9.0]) == ""
    assert comparison.verdict([1.0, 1.0, 1.1], [9.0, 9.0, 9.0]) == "slower"
    assert comparison.verdict([9.0, 9.0, 9.0], [1.0, 1.0, 1.1]) == "faster"
    assert comparison.verdict([1.0, 5.0, 9.0], [2.0, 6.0, 9.5]) == ""


def test_small_changes_are_added_up():
    changes = [comparison.Change(f"cause {i}", 1.0, 1.0 + i) for i in range(20, 0, -1)]
    text = compare.change_table("cause", changes).splitlines()
    assert len(text) == 1 + compare.MOST + 1
    assert text[1].split() == ["cause", "20", "1.00", "21.00", "+20.00"]
    assert text[-1].split() == ["8", "smaller", "changes", "8.00", "44.00", "+36.00"]


def test_what_to_know_before_believing_is_said_of_both(capsys):
    before, after = run(1), run(2)
    compare.print_runs(before, after)
    assert "share" not in capsys.readouterr().out
    for one in (*before[0].trace.ranks, *after[0].trace.ranks):
        one.host, one.cores = "host", (0,)
    before[0].trace.meta["per_operation"] = True
    compare.print_runs(before, after)
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("2 ranks share 1 core(s)") == text.count("A and B: host: 2 ranks share") == 1
    assert "only A was traced with --trace-ops" in text


# --- the command, on real runs


@pytest.mark.slow
def test_the_command_names_the_slow_rank_and_its_pass(late_runs):
    text = printed("compare", late_runs["none"], late_runs["delay"])
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("cause  "))
    first = {lines[start + 1].split("  ")[0], lines[start + 2].split("  ")[0]}
    assert first == {"compute: forward of stage 0", "waiting for rank 1"}
    assert lines[start + 1].endswith("slower")
    start = next(i for i, line in enumerate(lines) if line.startswith("cause of waiting"))
    assert lines[start + 1].startswith("rank 1: forward of stage 0 ")
    printed("compare", late_runs["none"], late_runs["delay"], "--check", code=EXIT_CHECK_FAILED)
    printed("compare", late_runs["delay"], late_runs["none"], "--check")


def test_a_cost_model_explains_a_part_and_names_the_rest(late_runs, tmp_path):
    """The planted sleep is in no model: all of it stays, and the parts of both runs are equal."""
    known = machine()
    config = config_of(late_runs["none"])
    own = replace(known.units[0], model=settings_of(config.model), dtype=config.run.dtype, tp=2)
    machine_file.save(replace(known, units=(own,)), str(tmp_path / "machine.json"))
    text = printed(
        "compare", late_runs["none"], late_runs["delay"], "--machine", tmp_path / "machine.json"
    )
    rows = {line.split("  ")[0]: line.split()[-3:] for line in text.splitlines()}
    parts = {
        "passes of the busiest rank, at A's FLOP/s",
        "products of other shapes",
        "idle in the pipeline",
        "messages between stages",
        "sums over replicas",
        "update",
        "all parts",
    }
    assert parts < set(rows)
    assert {rows[part][2] for part in parts} == {"+0.00"}
    assert float(rows["measured, and not in the model"][2]) > 50
    assert "ms the cost model explains +0.00 ms" in text
    other = replace(own, tp=1)
    machine_file.save(replace(known, units=(other,)), str(tmp_path / "other.json"))
    assert_refused(
        2,
        ["has no passes of this model"],
        "compare",
        late_runs["none"],
        late_runs["delay"],
        "--machine",
        tmp_path / "other.json",
    )


def test_passes_are_work_and_shapes_of_products(late_runs):
    work, shapes = work_and_shapes(comparison.Change("passes", 100.0, 90.0), 10, 8)
    assert (work.before_ms, work.after_ms) == (100, 80)  # 8 of 10 parts of the work
    assert (shapes.before_ms, shapes.after_ms) == (0, 10)  # and each takes longer
    config = config_of(late_runs["none"])
    twice = replace(config, train=replace(config.train, batch_size=2 * config.train.batch_size))
    assert most_flops(twice) == 2 * most_flops(config) > 0


def test_items_of_a_step_make_up_the_step():
    """Also where time between spans begins in one step and ends in the next."""
    run = trace([[]], [[span("F", 0, 40), span("F", 60, 100, step=2)]], steps=2)
    items = comparison.by_item(analyse(run), True)
    assert [sum(each) for each in zip(*items.values(), strict=True)] == pytest.approx([50, 50])


def test_a_run_is_as_fast_as_itself(late_runs):
    text = printed("compare", late_runs["none"], late_runs["none"], "--check")
    assert "B takes 1.00x as long, within the spread: neither slower nor faster" in text


def test_launches_are_separated_by_commas(late_runs, tmp_path):
    copies = [shutil.copytree(late_runs["none"], tmp_path / str(number)) for number in range(3)]
    several = ",".join(map(str, copies))
    text = printed("compare", several, several, "--check")
    assert text.count("A: ") == 3
    assert "(medians of 3 and 3 launches)" in text
    again = f"{tmp_path}/./0"
    assert_refused(
        2,
        [f"{copies[0]}, {again}: one launch, named 2 times"],
        "compare",
        f"{several},{again}",
        several,
    )


def test_settings_and_layouts_that_differ_are_shown(late_runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(late_runs["none"], other)
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace("d-model = 16", "d-model = 32"))
    meta = json.loads((other / "trace" / "meta.json").read_text())
    meta["layout"] = meta["layout"] | {"tp": 1, "dp": 2}
    (other / "trace" / "meta.json").write_text(json.dumps(meta))
    for path in (other / "trace").glob("rank-*.jsonl"):  # the two axes change their names
        text = path.read_text().replace('"dp"', '"?"')
        path.write_text(text.replace('"tp"', '"dp"').replace('"?"', '"tp"'))
    text = printed("compare", late_runs["none"], other)
    assert "   d-model: 16 -> 32" in text.splitlines()
    assert "the layouts differ" in text
    assert f"B: {other}: 2 ranks (dp 2), " in text


@pytest.mark.parametrize(("words", "code", "message"), [
    (["none"], 2, "the following arguments are required: RUN_B"),
    (["none", "missing"], 65, "missing: no such run folder; record one with"),
    (["none", "."], 65, "this run has no trace; record one with"),
    (["none", "none/config.toml"], 65, "config.toml: no such run folder"),
    (["none", "none", "--steps", "3"], 2, "--steps: mpipar compare does not use it"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(late_runs, words, code, message):
    base = late_runs["none"].parent
    words = [word if word.startswith("-") or word.isdigit() else base / word for word in words]
    assert_refused(code, [message], "compare", *words)
