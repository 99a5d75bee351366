"""Traces: their files, their tables, and a planted delay that must be found."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from helpers import find_launcher
from in_process import alone, assert_refused, printed
from program import mpipar
from report_cases import data_of
from short_runs import FAULTS, TRACED, traced
from trace_cases import blocking, check_arrows, check_slices, span
from trace_cases import trace as made
from trace_cases import waits_and_segments as analyse

from mpipar.config.run import traced_steps
from mpipar.errors import DataError
from mpipar.run.trace import trace_file
from mpipar.study.report import trace_data
from mpipar.study.trace import waits
from mpipar.study.trace.analysis import Analysis
from mpipar.study.trace.causes import Causes
from mpipar.study.trace.segments import timeline

pytestmark = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")


PASSES = 5 * 2  # of the five traced steps of two microbatches


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    """Rank 1 sleeps 50 ms in one named layer, once a microbatch, in every step.

    A run that was delayed for longer by other work is repeated, since it shows another cause.
    """
    folder = tmp_path_factory.mktemp("late") / "run"
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        trace = traced(folder, *TRACED, "--layout", "tp=2", "--trace", "2:6", fault="delay")
        if max(rank.end - rank.start for rank in trace.ranks) < 1.5 * PASSES * 50e6:
            break
    return trace, folder


def test_every_call_has_its_partner_and_every_instant_its_segment(delayed):
    trace, _ = delayed
    found, pieces = analyse(trace)
    assert not found.unmatched
    assert found.events
    for rank, own in zip(trace.ranks, pieces, strict=True):
        assert own[0].start == rank.start
        assert own[-1].end == rank.end
        assert all(a.end == b.start for a, b in itertools.pairwise(own))


@pytest.mark.alone
def test_a_planted_delay_is_the_cause_and_the_wait_is_its_lateness(delayed):
    """The wait of rank 0 at the barrier after the delay is how much later rank 1 came, +- 2 ms."""
    trace, _ = delayed
    found, pieces = analyse(trace)
    events = [
        event
        for event in found.events
        if event.name == "block1.attn.proj" and event.calls[0].record.phase == "F"
    ]
    assert len(events) == PASSES
    for event in events:
        calls = {call.rank: call for call in event.calls}
        lateness = calls[1].record.posted_ns - calls[0].record.posted_ns
        came = calls[1].record.posted_ns
        left = max(one.done_ns for one in trace.ranks[1].records if one.done_ns <= came)
        assert came - left > 50e6, "rank 1 slept 50 ms before this barrier"
        assert abs(calls[0].wait_ns - lateness) < 2e6
        assert event.last == 1
        assert calls[1].wait_ns == 0
    cause, cost = next(iter(Causes(trace, found, pieces).costs().items()))
    assert cause.kind == "compute"
    assert cause.ranks == (1,)
    assert cause.what == "forward of stage 0, block1.norm1"
    assert cost.wait_ns > 0.8 * sum(call.wait_ns for event in events for call in event.calls)


@pytest.mark.alone
@pytest.mark.fault
def test_the_command_names_the_late_rank_the_barrier_and_the_line(delayed):
    _, folder = delayed
    text = printed("trace", folder)
    assert re.search(r"^- slow rank \(.*\): rank 1 on \S+ computes", text, re.MULTILINE), text
    cause = r"^rank 1: forward of stage 0, block1\.norm1 .* rank 0 +tp block\*\.attn\.proj$"
    assert re.search(cause, text, re.MULTILINE), text
    for layer in ("attention", "ffn"):  # each barrier has its own place
        assert re.search(rf" layers/{layer}\.py:\d+", text)
    assert re.search(r"^tp block\*\.attn\.proj .*rank 1", text, re.MULTILINE)
    assert all(len(line) <= 100 for line in text[: text.index("efficiency ")].splitlines())


def test_the_files_that_were_asked_for_are_written(delayed, tmp_path):
    _, folder = delayed
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    text = printed("trace", folder, "--html", page, "--perfetto", events)
    assert [line.split(": ")[0] for line in text.splitlines()] == [str(events), str(page)]
    alone, whole = (data_of(one.read_text()) for one in (page, folder / "report.html"))
    assert "rank 1: forward of stage 0" in str(whole)
    assert {name: whole[name] for name in alone.keys() - {"title", "model", "curves"}} == {
        name: value for name, value in alone.items() if name not in ("title", "model", "curves")
    }
    found = json.loads(events.read_text())["traceEvents"]
    check_slices(found)
    leads = [
        (start["pid"], end["pid"])
        for start, end in check_arrows(found)
        if start["name"] == "block1.attn.proj"
    ]
    assert leads.count((1, 0)) >= PASSES  # in every step and microbatch rank 1 was late


def test_a_trace_that_cannot_be_read_does_not_fail_the_report(delayed, tmp_path):
    """An example: rank 1 wrote to a disk of its own host."""
    folder, said = tmp_path / "run", []
    shutil.copytree(delayed[1], folder)
    (folder / "trace" / "rank-00001.bin").unlink()
    assert trace_data(folder, said.append) == {}
    assert re.match(r"report\.html is without the trace: .*rank-00001\.bin: No such file", said[0])


def test_the_timeline_shows_the_wait():
    """Rank 0 waits for most of the time, for rank 1 in its forward."""
    records = [[blocking("all_reduce", "block0.ffn.down", "tp", came, 80)] for came in (10, 78)]
    case = made(records, [[span("F", 0, 80)]] * 2)
    rows = timeline(case, analyse(case)[1], width=len("rank 0 ") + 100).splitlines()
    assert rows[1] == "rank 0 " + 10 * "F" + 68 * "." + 2 * "-"
    assert rows[2] == "rank 1 " + 78 * "F" + 2 * "-"


@pytest.mark.parametrize(("flags", "message"), [
    (["--trace", "5:9"], "--trace 5:9 with --steps 6"),
    (["--trace", "x"], "--trace x: "),
])  # fmt: skip
def test_steps_that_do_not_exist_are_refused(tmp_path, flags, message):
    assert_refused(2, [message], "train", *TRACED, *flags, "--out", tmp_path / "run")


def test_a_run_without_a_trace_says_how_to_make_one(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run", "nothing"):
        assert_refused(65, ["mpipar train --trace 10:12"], "trace", tmp_path / name)


def with_head(change):
    """An edit of a rank's file: `change` of its head."""

    def edit(files):
        head, rows = files[1].split(b"\n", 1)
        return json.dumps(json.loads(head) | change).encode() + b"\n" + rows

    return edit


@pytest.mark.parametrize(("name", "edit", "message"), [
    ("rank-00001.bin", lambda files: files[0], "of another rank or run than .* one run"),
    ("rank-00001.bin", with_head({"recording": "x"}), "of another rank or run .* from one run"),
    ("meta.json", lambda files: re.sub(b'"recording": "[0-9a-f]+"', b'"recording": "x"', files[2]),
     "of another rank or run .* must come from one run"),
    ("rank-00001.bin", with_head({"host": "a\x1b[2J"}), r"not of a trace: .*host is 'a\\x1b\[2J'"),
    ("rank-00001.bin", with_head({"steps": [[1, 2, 3]]}), "different steps: .* from one run"),
    ("rank-00001.bin", with_head({"cores": [9**50]}), "may not have the value"),
    ("rank-00001.bin", with_head({"mpipar_trace": 7}), "this mpipar reads 5; record one"),
    ("rank-00001.bin", with_head({"texts": []}), "contradicts itself: IndexError"),
    ("rank-00001.bin", with_head({"rows": [1]}), "argument 2 is longer"),
    ("rank-00001.bin", lambda files: files[1][:-30], "bytes of rows of .* copied only in part"),
    ("rank-00001.bin", lambda files: files[1] + bytes(8), "rows of .* copied only in part"),
    ("meta.json", lambda files: re.sub(rb'"world_size": 2', b'"world_size": 9000000', files[2]),
     "trace/rank-00002.bin: No such file"),
    ("rank-00001.bin", lambda files: b"", "is not JSON"),
    ("meta.json", lambda files: files[2].replace(b'"owners"', b'"x"'), "of a trace: it.clock has"),
    ("meta.json", lambda files: b'{"mpipar_trace": 5}', "of its keys: it lacks recording, wo"),
])  # fmt: skip
def test_files_that_are_broken_or_of_several_runs_are_refused(
    delayed, tmp_path, name, edit, message
):
    folder = tmp_path / "run"
    shutil.copytree(delayed[1], folder)
    files = [
        (folder / "trace" / one).read_bytes()
        for one in ("rank-00000.bin", "rank-00001.bin", "meta.json")
    ]
    (folder / "trace" / name).write_bytes(edit(files))
    with pytest.raises(DataError, match=message):
        trace_file.read(folder)


def test_an_operation_that_never_ended_lasts_until_the_failure(delayed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(delayed[1], folder)
    path = folder / trace_file.rank_name(1)
    head, rows = path.read_bytes().split(b"\n", 1)
    count = json.loads(head)["rows"][0]
    table = np.frombuffer(rows, "<i8").copy()
    table[3 * count - 2 : 3 * count] = 0  # the last two never ended
    table[2 * count - 1] = 0  # the last one not even waited
    path.write_bytes(head + b"\n" + table.tobytes())
    trace = trace_file.read(folder)
    waited, posted = trace.ranks[1].records[-2:]
    assert waited.posted_ns == waited.waited_ns < waited.done_ns == trace.ranks[1].end
    assert posted.posted_ns < posted.waited_ns == posted.done_ns == trace.ranks[1].end
    assert all(call.transfer_ns >= 0 for own in waits.find(trace).calls for call in own)


@pytest.mark.parametrize(
    ("text", "first", "last", "steps"),
    [
        (None, 1, 12, (10, 12)),
        (None, 1, 11, None),
        (None, 11, 300, None),
        ("none", 1, 300, None),
        ("3:4", 1, 5, (3, 4)),
        ("3", 3, 5, (3, 3)),
        ("3:4", 4, 5, None),
    ],
)
def test_the_steps_of_a_trace(text, first, last, steps):
    assert traced_steps(text, first, last) == steps


def test_every_longer_run_ends_with_who_waited_where(tmp_path):
    words = "--layers 1 --d-model 8 --heads 1 --seq-len 4 --steps 12 --sample-tokens 0".split()
    words += "--eval-tokens 64 --tp 2 --heads 2".split()
    done = mpipar("train", *words, "--out", tmp_path / "a", ranks=2)
    assert done.returncode == 0, done.tail()
    table = done.stdout.split("barriers of a traced step")[1]
    assert re.search(r"^tp block\*\.ffn\.down +all_reduce .* \S+\.py:\d+$", table, re.MULTILINE)
    assert [step for step, *_ in trace_file.read(tmp_path / "a").ranks[0].steps] == [10, 11, 12]
    assert alone("train", *words[:-4], "--trace", "none", "--out", tmp_path / "b").returncode == 0
    assert not (tmp_path / "b" / "trace").exists()


# --- real runs with a rank or link that is late by at least half a step: rank and cause are named


SIZE = (
    "--d-model 64 --heads 4 --seq-len 32 --batch-size 8 --num-microbatches 2 --layers 2"
    " --steps 6 --trace 3:6 --sample-tokens 0 --schedule 1f1b"
).split()
FOUR = ("pp=4",)  # layouts of four ranks, which share cores on a small machine


def analysed(folder, fault, layout):
    flags = ["--save-interval", "1"] * (fault == "save")
    flags += ["--layers", "4"] * (layout in FOUR)
    tokens = folder.with_name("tokens.bin")
    (np.arange(2_000, dtype=np.uint16) % 256).tofile(tokens)  # little to evaluate
    return Analysis(
        traced(
            folder,
            *SIZE,
            *flags,
            "--data",
            str(tokens),
            "--layout",
            layout,
            fault=fault,
            ranks=4 if layout in FOUR else 2,
        )
    )


def undisturbed(folder, fault, layout, accepted):
    """Return the analysis of a run, repeated if the machine delayed it longer than the fault."""
    for number in range(3):
        analysis = analysed(folder / f"run-{number}", fault, layout)
        if accepted(analysis):
            break
    return analysis


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "layout"), [("data", "dp=2"), ("F", "pp=2"), ("gc", "tp=2")])
def test_the_late_rank_is_named(tmp_path, layout, fault):
    words = FAULTS[fault].format(stage=int(layout == "pp=2"), layer="block1.norm1")
    analysis = undisturbed(
        tmp_path,
        fault,
        layout,
        lambda found: (
            next(iter(found.costs)).text() == f"rank 1: {words}"
            and (fault not in "FB" or found.findings)
        ),
    )
    assert next(iter(analysis.costs)).text() == f"rank 1: {words}"
    if fault not in "FB":
        return
    assert analysis.findings, analysis.trace.remarks()
    finding = analysis.findings[0]
    assert finding.kind == "slow rank"
    assert "rank 1 on " in finding.text
    assert words in finding.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fault", "said"),
    [
        ("dp=2", "dp link", "dp group 0, 1"),
        ("pp=2", "pp link", "pp link 0 -> 1"),
        ("tp=2", "tp link", "tp group 0, 1"),
        ("tp=2", "none", ""),
        (*FOUR, "none", ""),
    ],
)
def test_a_slow_link_is_named_and_a_healthy_run_has_no_finding(tmp_path, layout, fault, said):
    kinds = ["slow link"] * bool(said)
    analysis = undisturbed(
        tmp_path, fault, layout, lambda found: [one.kind for one in found.findings[:1]] == kinds
    )
    assert [one.kind for one in analysis.findings[:1]] == kinds
    assert not said or analysis.findings[0].text.startswith(said)
