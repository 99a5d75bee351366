"""Steps on two hosts, which bench.step --cable measures."""

import json
import os
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import find_launcher, run_command
from program import one_block

from bench.interconnect import two_hosts
from bench.interconnect.two_hosts import missing
from bench.step import __main__ as step
from bench.step import cable
from mpipar.errors import UsageError

SIZES = "--layers 2 --d-model 24 --heads 4 --seq-len 20 --batch-size 4 --vocab-size 31 --repeats 2"


def test_a_gain_is_that_of_the_same_repetition():
    """A spell that makes one repetition of all sides ten times slower changes nothing."""
    spell = np.array([1, 10, 1])[:, None]
    seconds = np.zeros((2, 2, 3, 3))  # ranks, sides, repetitions, (two parts, communication)
    seconds[0, 0], seconds[1, 0] = spell * (0.6, 0.2, 0.3), spell * (0.8, 0.2, 0.5)
    seconds[0, 1], seconds[1, 1] = spell * (0.6, 0.2, 0.2), spell * (0.4, 0.2, 0.1)
    flights = np.array([[[4, 0], [4, 1]], [[6, 0], [4, 3]]])
    nothing, progress = cable.layout_rows("pp 2", seconds, flights)
    assert (nothing["overlap"], progress["overlap"]) == cable.LAYOUTS["pp 2"][1]
    assert nothing["step_ms"] == pytest.approx(1000)
    assert progress["step_ms"] == pytest.approx(800)
    assert [nothing[name] for name in cable.GAINS] == [0, 0, 0]
    assert [progress[name] for name in cable.GAINS] == pytest.approx([20, 20, 20])
    assert (nothing["best_gain_percent"], progress["best_gain_percent"]) == pytest.approx((0, 20))
    assert nothing["in_communication"] == pytest.approx(0.8 / 1.8)
    assert (nothing["computed_percent"], progress["computed_percent"]) == (0, 50)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cable 0", "--cable"),
        ("--cable 200,x", "--cable"),
        ("--cable 1e3 --json x", "--cable"),
        ("--cable 200 --dtype bfloat16 --threads 2", "leave out --threads, --dtype"),
        ("--cable 200 --freed --arch llama --kv-heads 2", "leave out --arch, --kv-heads, --freed"),
        ("--cable 200 --recipe nanogpt --no-compiled", "leave out --compiled, --recipe"),
    ],
)
def test_a_cable_that_cannot_be_is_refused(words, message, capsys):
    with pytest.raises((UsageError, SystemExit)) as caught:
        step.parse(words.split())
    assert message in f"{caught.value}{capsys.readouterr().err}"


def test_ranks_are_not_started_by_hand():
    session = SimpleNamespace(
        launcher=SimpleNamespace(size=2, name="mpiexec"), stop_on_request=nullcontext
    )
    with pytest.raises(UsageError, match="starts its ranks itself: run it without mpiexec"):
        cable.on_each_cable(session, step.parse(["--cable", "200"]))
    code, block = one_block(
        run_command([sys.executable, "-m", "bench.step.cable", "--json", "none.json"], timeout=60)
    )
    assert (code, "start it by python -m bench.step --cable 200" in block) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_container_that_forbids_namespaces_is_named(monkeypatch, tmp_path):
    for name in two_hosts.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\necho 'Operation not permitted' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reason = two_hosts.missing.__wrapped__()
    assert re.fullmatch(
        "ip netns add trial.*: Operation not permitted; a container must be started"
        " with --privileged",
        reason,
    )


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=f"network namespaces: {missing()}")
@pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
def test_each_side_is_timed_at_each_rate(tmp_path):
    path = tmp_path / "cable.json"
    done = run_command(
        [sys.executable, "-m", "bench.step", "--cable", "500,1000", *SIZES.split(), "--json", path],
        timeout=100,
    )
    if "no network namespaces here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.tail()
    assert "2 hosts of 1 rank, 2 steps" in done.stdout
    rows = {
        (row["cable_mbit"], row["layout"], row["overlap"]): row
        for row in json.loads(path.read_text())["rows"]
    }
    assert set(rows) == {
        (rate, layout, name)
        for rate in (500, 1000)
        for layout, (_, names, _) in cable.LAYOUTS.items()
        for name in names
    }
    for rate in (500, 1000):
        hidden = {
            name: rows[rate, "dp 2", name]["computed_percent"] for name in cable.LAYOUTS["dp 2"][1]
        }
        assert hidden["nothing"] == hidden["progress"] == 0 < hidden["units"]
