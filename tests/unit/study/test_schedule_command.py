"""`mpipar schedule`, its explorer, and the simulator: every span against a second computation.

How far a schedule is from the best is found by an exact search under a memory cap, with unit costs
(f = i = w = 1). Microbatches are interchangeable, so a state is how many F, I and W each stage has
done. Time goes in steps of one pass; what a step makes can be used from the next step on.
"""

import base64
import json
import re
import zlib
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import assert_refused, at_once, printed
from schedule_cases import compute, counts
from trace_cases import pipeline_trace

from mpipar import cli
from mpipar.commands import schedule as command
from mpipar.errors import OutputError, UsageError
from mpipar.pipeline.check import ScheduleError
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.instructions import (
    is_compute,
    neighbours,
    parts,
)
from mpipar.pipeline.schedules.catalog import FAMILIES, SCHEDULES, make_schedule, schedule_problems
from mpipar.run.trace import trace_file
from mpipar.study.schedules import draw, explorer
from mpipar.study.schedules.simulate import Costs, simulate


def run(words, capsys):
    assert command.run(cli.context_of(None, "schedule", words.split())) == 0
    return capsys.readouterr().out


def test_the_textbook_picture():
    assert draw.grid(simulate(make_schedule("1f1b", 3, 4), Costs())) == "\n".join(
        [
            "time     0              5              10             15",
            "worker 0 F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---",
            "worker 1 .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .",
            "worker 2 .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .",
        ]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_and_json(name, capsys):
    found = json.loads(run(f"{name} --pp 4 --num-microbatches 8 --costs 2,2,1 --json", capsys))
    timeline = simulate(make_schedule(name, 4, 8), Costs(2, 2, 1))
    assert found["makespan"] == timeline.makespan
    assert found["messages"] == list(timeline.messages)
    assert found["peak_stash"] == list(timeline.peak_stash)
    assert found["workers"][1] == [[str(instr), s, e] for instr, s, e in timeline.spans[1]]
    assert found["closed_form"]["messages"]["value"] == sum(timeline.messages)


def test_costs_and_latency(capsys):
    words = "gpipe --pp 2 --num-microbatches 3 --costs .5,1,1/2 --latency 25e-2 --json"
    assert json.loads(run(words, capsys))["makespan"] == (3 + 1) * 2 + 2 * 0.25
    found = json.loads(run("dualpipe-v --costs 1,1,1,2 --json", capsys))
    timeline = simulate(make_schedule("dualpipe-v", 4, 8), Costs(overlap=2 / 3))
    assert found["makespan"] == timeline.makespan


def test_compare(capsys):
    text = run("--compare --pp 4 --num-microbatches 8", capsys)
    assert "proved: every pass once" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert set(SCHEDULES) <= set(rows)
    assert rows["naive"] == ["naive", "4", "96", "75.0", "%", "1.00", "x", "1", "48"]
    assert rows["1f1b"] == ["1f1b", "4", "33", "27.3", "%", "2.91", "x", "4", "48"]
    assert rows["interleaved"][1:3] == ["8", "28.5"]
    assert rows["zb-v"][1:4] == ["8", "25.5", "5.9"]
    text = run("--compare --pp 3 --num-microbatches 5 --chunks 3", capsys)
    assert "--schedule dualpipe-v with --pp 3" in text
    assert "looped-bfs 9" in " ".join(text.split())


def test_csv_in_both_directions(tmp_path, capsys):
    path = tmp_path / "order.csv"
    before = run(f"v-half --pp 3 --num-microbatches 4 --csv {path}", capsys)
    after = run(f"--from-csv {path}", capsys)
    assert after.splitlines()[0].startswith("order.csv: 3 workers, 6 stages, 4 microbatches")
    panel = slice(3, 7)
    assert after.splitlines()[panel] == before.splitlines()[panel]
    assert run("v-half --pp 3 --num-microbatches 4 --csv -", capsys) == path.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ["which schedule?", "zb-h1"]),
        ("1f1", ["did you mean 1f1b?"]),
        ("1f1b --json --csv -", ["--json and --csv - both print"]),
        (
            "dualpipe-v --pp 5 --costs 1,x --latency -1",
            [
                "--costs 1,x: must be a number",
                "--latency -1: must be a number",
                "--schedule dualpipe-v with --pp 5",
            ],
        ),
        ("zb-h1 --book", ["--book: zb-h1 has the passes I, W"]),
        ("1f1b --book --symbols", ["--book and --symbols: give one"]),
        ("--compare --book", ["leave --book out"]),
        ("1f1b --costs 1,1", ["--costs: use three numbers"]),
        ("1f1b --costs 0,1,1", ["--costs 0: must be greater than 0"]),
        ("1f1b --costs 1,1/0,1", ["--costs 1,1/0,1: must be a number"]),
        ("1f1b --chunks 2", ["leave --chunks out"]),
        ("--from-csv no.csv --compare --chunks 2", ["leave --compare and --chunks out"]),
        ("--compare --symbols --json --csv a.csv", ["leave --symbols and --json and --csv out"]),
        ("looped-bfs --group-size 4", ["--group-size: is gone; leave it out"]),
        ("--from-csv no.csv", ["cannot read no.csv"]),
        ("--compare --pp 0", ["--pp 0: must be at least 1"]),
        (f"gpipe --pp {10**30}", [f"--pp {10**30}: must be at most 4,096"]),
        ("gpipe --num-microbatches 1e3", ["--num-microbatches 1e3: must be a whole number"]),
        ("looped-bfs --chunks 9999", ["--chunks 9999: must be at most 1,024"]),
        ("v-min --pp 4096 --num-microbatches 65536", ["at most 262,144 forward passes"]),
        ("--compare --chunks 1024 --pp 9", ["--pp times --chunks times --num-microbatches may"]),
        ("zb-v --pp 4096 --num-microbatches 32 --html a.html", ["--html draws at most 4,096"]),
        (
            "--compare --json --html a.html",
            ["--html writes one page and nothing else: leave --compare and"],
        ),
        (
            "--from-run run 1f1b --costs 1,1,1 --html a.html",
            ["--from-run brings its own schedule and costs: leave NAME and --costs out"],
        ),
        ("--from-run run", ["add --html FILE"]),
    ],
)
def test_mistakes(words, expected, capsys):
    """In no time, however large a number is."""
    with at_once(5), pytest.raises(UsageError) as caught:
        run(words, capsys)
    for text in expected:
        assert text in str(caught.value)


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(OutputError, match=r"cannot write .*picture\.svg"):
        run(f"1f1b --svg {tmp_path}/none/picture.svg", capsys)


# --- the schedule explorer: its orders as data, what it is filled with, and refusals


def parts_of(page):
    """(data, orders) of a page."""
    data, orders = (
        re.search(rf'id="{name}">(.*?)</script>', page)[1] for name in ("data", "orders")
    )
    return json.loads(data), json.loads(zlib.decompress(base64.b64decode(orders)))


def few_orders(monkeypatch):
    """Let the page hold the orders of a few counts alone: making them all takes seconds."""
    monkeypatch.setattr(explorer, "RANKS", (2, 4))
    monkeypatch.setattr(explorer, "MICROBATCHES", (4, 8))
    known = explorer.known_orders
    monkeypatch.setattr(explorer, "known_orders", lambda: known((2, 4), (4, 8)))


def test_the_orders_are_those_of_the_catalog():
    known = explorer.known_orders((3, 4), (5, 8))
    for key, orders in known.items():
        name, p, m, chunks = key.split()
        if isinstance(orders, str):
            assert FAMILIES[name].rounds
            with pytest.raises(UsageError, match=re.escape(orders.split(";")[0])):
                make_schedule(name, int(p), int(m), int(chunks))
            continue
        programs = make_schedule(name, int(p), int(m), int(chunks)).programs
        assert [[parse_instruction(text) for text in row.split()] for row in orders] == [
            [instr for instr in program if is_compute(instr)] for program in programs
        ]
    assert {key.split()[0] for key in known} == set(FAMILIES)
    assert sum(key.startswith("interleaved ") for key in known) == 2 * 2 * 3


def test_the_page_begins_with_what_the_command_line_says(monkeypatch, tmp_path):
    few_orders(monkeypatch)
    path = tmp_path / "page.html"
    text = printed(
        "schedule", "zb-v", "--pp", 2, "--costs", "2,1,1/2", "--latency", "1/4", "--html", path
    )
    assert text == f"{path}: open it in a browser\n"
    data, orders = parts_of(path.read_text())
    assert data["start"] == {
        "first": "zb-v",
        "second": "zb-h1",
        "p": 2,
        "m": 8,
        "chunks": 2,
        "share": "worker",
        "overlap": 1,
        "f": 2,
        "i": 1,
        "w": 0.5,
        "hop": 0.25,
    }
    assert data["own"] is None
    assert len(orders["zb-v 2 8 2"]) == 2


def test_other_counts_and_files_are_put_beside_the_orders(monkeypatch, tmp_path):
    few_orders(monkeypatch)
    path, table = tmp_path / "page.html", tmp_path / "own.csv"
    printed("schedule", "1f1b", "--pp", 9, "--html", path)
    data, _ = parts_of(path.read_text())
    assert (data["start"]["first"], data["start"]["second"]) == ("own", "")
    assert len(data["own"]["schedule"]["programs"]) == 9
    printed("schedule", "dualpipe-v", "--pp", 2, "--csv", table)
    printed("schedule", "--from-csv", table, "--html", path)
    data, _ = parts_of(path.read_text())
    assert data["own"]["title"] == "own.csv, 2 workers"
    assert data["own"]["schedule"]["stageToRank"] == [0, 1, 1, 0]


def test_a_run_needs_a_trace_and_a_pipeline(monkeypatch, tmp_path):
    words = "schedule", "--from-run", tmp_path, "--html", tmp_path / "page.html"
    assert_refused(65, ["--trace"], *words)
    monkeypatch.setattr(trace_file, "read", lambda folder: pipeline_trace("gpipe", 1, 4))
    assert_refused(2, ["has one pipeline rank"], *words)


# --- the simulator


def longest_paths(schedule, costs):
    """End of every pass: repeated relaxation over all dependencies, until nothing changes."""
    f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
    duration = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w, strict=True)]}
    ends, arrivals, previous = {}, {}, None
    while ends != previous:
        previous = dict(ends)
        for pp_rank in range(schedule.pp_size):
            clock = 0
            for instr in compute(schedule, pp_rank):
                received, sent = neighbours(schedule, instr)
                start = max([clock, *(arrivals.get(message, 0) for message in received)])
                total = sum(duration[kind][stage] for kind, stage, _ in parts(instr))
                clock = start + total * (costs.overlap if len(parts(instr)) == 2 else 1)
                ends |= dict.fromkeys(parts(instr), clock)
                for message in sent:
                    arrivals[message] = clock + costs.latency * message.is_remote
    return ends


@given(counts(max_p=4, max_m=6), st.data())
@settings(max_examples=120, deadline=None)
def test_every_span_is_a_longest_path(case, data):
    """Random costs by stage, latency and overlap; exact arithmetic."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
    by_stage = st.tuples(*[cost] * schedule.num_stages)
    costs = Costs(
        data.draw(by_stage),
        data.draw(by_stage),
        data.draw(by_stage),
        overlap=data.draw(st.fractions(Fraction(1, 2), 1)),
        latency=data.draw(st.fractions(0, 2, max_denominator=8)),
    )
    timeline = simulate(schedule, costs)
    ends = longest_paths(schedule, costs)
    for spans, program in zip(timeline.spans, schedule.programs, strict=True):
        assert tuple(span.instr for span in spans) == program
        for span in spans:
            if is_compute(span.instr):
                assert {ends[part] for part in parts(span.instr)} == {span.end}
        assert all(a.end <= b.start for a, b in pairwise(spans))
    assert timeline.makespan == max(ends.values())


@pytest.mark.parametrize(
    "name",
    [
        "gpipe",
        "looped-bfs",
        "1f1b",
        "eager-1f1b",
        "interleaved",
        "zb-h1",
        "interleaved-zb",
        "zb-v",
        "zb-h2",
        "naive",
    ],
)
def test_latency_terms(name):
    """A constant latency c per hop lengthens the step by the published multiple of c."""
    published = {
        "naive": lambda p, m, v: 2 * m * (p - 1),
        "gpipe": lambda p, m, v: 2 * (p - 1),
        "looped-bfs": lambda p, m, v: 2 * (p - 1),
        "1f1b": lambda p, m, v: 2 * (p - 1) * m // p + 2 * (p - 2),
        "eager-1f1b": lambda p, m, v: 2 * (p - 1),
        "interleaved": lambda p, m, v: 2 * (p * v - 1),
        "zb-h1": lambda p, m, v: 4 * (p - 1),
        "interleaved-zb": lambda p, m, v: 5 * p - 4,
        "zb-v": lambda p, m, v: 5 * p - 7,
        "zb-h2": lambda p, m, v: p - 1,
    }[name]
    for p in (2, 3, 4, 5, 8):
        for m in (2 * p, 3 * p) if p == 8 else (2 * p, 3 * p, 6 * p):
            for v in (2, 3) if name == "interleaved" else (None,):
                schedule = make_schedule(name, p, m, v)
                base = simulate(schedule, Costs()).makespan
                for c in (Fraction(1, 20), Fraction(1, 5), Fraction(1, 2)):
                    added = simulate(schedule, Costs(latency=c)).makespan - base
                    assert added == published(p, m, v) * c, (p, m)


@pytest.mark.parametrize("share", [Fraction(2, 3), Fraction(5, 6), 1])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 14), (8, 16)])
def test_dualpipe_v_bubble_of_the_last_rank(p, m, share):
    """(p-1)(f&b + b - 3w) with f = i = w = 1, also where overlapping saves time."""
    timeline = simulate(make_schedule("dualpipe-v", p, m), Costs(overlap=share))
    assert timeline.global_bubble[p - 1] == (p - 1) * (3 * share + 2 - 3)


def test_a_schedule_that_hangs_is_not_simulated():
    schedule = make_schedule("1f1b", 2, 2)
    swapped = list(schedule.programs[1])
    swapped[1:3] = swapped[2:0:-1]
    with pytest.raises(ScheduleError):
        simulate(replace(schedule, programs=(schedule.programs[0][:1] * 2, swapped)), Costs())


# How far each schedule is from the optimum.


def best_step(ranks, m, cap, limit):
    """Fewest steps in which all passes can be run, or None if more than `limit` are needed.

    ranks: the stages of each rank. cap: chunk-activations a rank may hold, from F until W.
    """
    start = tuple((0, 0, 0) for rank in ranks for _ in rank)
    done = tuple((m, m, m) for _ in start)
    layer = {start}
    for step in range(limit + 1):
        if done in layer:
            return step
        following = set()
        for state in layer:
            for moves in product(*(possible(state, stages, m, cap) for stages in ranks)):
                after = list(state)
                for stage, kind in moves:
                    if stage is not None:
                        counts = list(after[stage])
                        counts[kind] += 1
                        after[stage] = tuple(counts)
                if step + 1 + least_left(after, ranks, m) <= limit:
                    following.add(tuple(after))
        layer = undominated(following, one_chunk=len(start) == len(ranks))
    return None


def possible(state, stages, m, cap):
    """The (stage, kind) a rank can run now; idling is a choice only where it can save memory."""
    held = sum(state[stage][0] - state[stage][2] for stage in stages)
    moves = []
    for stage in stages:
        f, i, w = state[stage]
        if f < m and held < cap and (stage == 0 or state[stage - 1][0] > f):
            moves.append((stage, 0))
        if i < f and (stage == len(state) - 1 or state[stage + 1][1] > i):
            moves.append((stage, 1))
        if w < i:
            moves.append((stage, 2))
    forwards_only = all(kind == 0 for _, kind in moves)
    if not moves or (len(stages) > 1 and forwards_only):
        moves.append((None, None))
    return moves


def least_left(state, ranks, m):
    """A lower bound for the steps still needed: a rank's work, and the last microbatch's way."""
    work = max(sum(3 * m - sum(state[stage]) for stage in stages) for stages in ranks)
    last = len(state) - 1
    ways = [0]
    for stage, (f, i, _) in enumerate(state):
        if i < m:
            ways.append((m - i) + stage + 1)  # down to stage 0, then its W
        if f < m:
            ways.append((m - f) + (last - stage) + last + 1 + 1)
    return max(work, *ways)


def undominated(states, one_chunk):
    """Drop a state if another one is ahead of it: that one could do the same from there on, or
    idle.

    With several chunks on a rank, being ahead in one chunk's F takes memory from the other's. So
    only states with equal F are compared.
    """
    groups = {}
    for state in states:
        key = None if one_chunk else tuple(f for f, _, _ in state)
        groups.setdefault(key, []).append(tuple(count for counts in state for count in counts))
    kept = set()
    for group in groups.values():
        front = []
        for flat in sorted(group, key=sum, reverse=True):
            if not any(all(a >= b for a, b in zip(other, flat, strict=True)) for other in front):
                front.append(flat)
        kept |= {tuple(zip(*[iter(flat)] * 3, strict=True)) for flat in front}
    return kept


# Unit passes by which a schedule's step is longer than the best with the same stash, at most, over
# p <= 4, m <= 6 with one stage a rank and p <= 2, m <= 4 with two.
WORST_GAP = {
    "naive": 18,
    "gpipe": 6,
    "1f1b": 6,
    "eager-1f1b": 6,
    "interleaved": 3,
    "looped-bfs": 3,
    "zb-h1": 0,
    "zb-h2": 1,
    "interleaved-zb": 0,
    "zb-v": 1,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 1,
}


@pytest.mark.parametrize("name", WORST_GAP)
def test_distance_from_the_best(name):
    """No schedule beats the search; -s prints how far each one is from it."""
    one_chunk = FAMILIES[name].stages_per_rank == 1
    most_p, most_m = (4, 6) if one_chunk else (2, 4)
    worst = 0
    for p, m in product(range(1, most_p + 1), range(1, most_m + 1)):
        if schedule_problems(name, p, m):
            continue
        schedule = make_schedule(name, p, m)
        timeline = simulate(schedule, Costs())
        ranks, cap = [schedule.stages_by_rank[r] for r in range(p)], max(timeline.peak_stash)
        best = best_step(ranks, m, cap, timeline.makespan)
        assert best is not None, f"shorter than the shortest: p = {p}, m = {m}"
        print(f"{name:15} p {p} m {m} stash {cap:2}: {timeline.makespan:3}, best {best:3}")
        worst = max(worst, timeline.makespan - best)
    assert worst == WORST_GAP[name]


def test_zero_bubble_is_the_best_there_is():
    """The makespan 3m + p - 1 cannot be beaten with any stash; 1F1B is 2(p-1) above it."""
    for p, m in ((2, 4), (3, 6), (4, 6)):
        ranks = [(r,) for r in range(p)]
        assert best_step(ranks, m, m, 60) == best_step(ranks, m, p, 60) == 3 * m + p - 1
        assert simulate(make_schedule("zb-h1", p, m), Costs()).makespan == 3 * m + p - 1
        assert simulate(make_schedule("1f1b", p, m), Costs()).makespan == 3 * m + 3 * (p - 1)
        assert best_step(ranks, m, p - 1, 60) > 3 * m + p - 1
