"""Real runs with a rank or link that is late by at least half a step: rank and cause are named."""

import numpy as np
import pytest
from traced_runs import FAULTS, traced

from mpipar.study.trace.analysis import Analysis

pytestmark = pytest.mark.slow

SIZE = (
    "--d-model 64 --heads 4 --seq-len 32 --batch-size 8 --num-microbatches 2 --layers 2"
    " --steps 6 --trace 3:6 --sample-tokens 0 --schedule 1f1b"
).split()
LAYOUTS = ("dp=2", "pp=2", "tp=2")
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


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize(
    ("layout", "link"),
    [
        ("dp=2", "dp group 0, 1"),
        ("pp=2", "pp link 0 -> 1"),
        ("tp=2", "tp group 0, 1"),
    ],
)
def test_a_slow_link_is_named(tmp_path, layout, link):
    analysis = undisturbed(
        tmp_path,
        link[:2] + " link",
        layout,
        lambda found: found.findings and found.findings[0].kind == "slow link",
    )
    finding = analysis.findings[0]
    assert finding.kind == "slow link"
    assert finding.text.startswith(link)


@pytest.mark.parametrize("layout", LAYOUTS + FOUR)
def test_a_healthy_run_has_no_finding(tmp_path, layout):
    analysis = undisturbed(tmp_path, "none", layout, lambda found: not found.findings)
    assert analysis.findings == []
