"""Only planted faults are named: an uneven stage, a heavy head, a slow rank."""

import numpy as np
import pytest
from planted_delays import Run, Simulator
from program import TEXT
from trace_cases import span, trace
from traced_runs import traced

from mpipar.study.trace.analysis import Analysis

# Large enough that products, not Python, take a stage's time.
SIZE = [
    *TEXT,
    *"""--d-model 128 --heads 4 --seq-len 64 --batch-size 8 --num-microbatches 4
    --layout pp=2 --schedule gpipe --steps 5 --trace 3:5 --sample-tokens 0""".split(),
]


def found_in(run):
    return {finding.kind: finding for finding in Analysis(run).findings}


@pytest.mark.slow
def test_an_uneven_stage_is_named(tmp_path):
    run = traced(tmp_path / "run", *SIZE, "--layers", "4", "--stage-layers", "4,0")
    finding = found_in(run)["uneven stage"]
    assert finding.text.startswith("pipeline rank 0 (stage 0: embedding, blocks 0-3) computes ")
    assert finding.text.endswith("balanced by FLOPs: --stage-layers 2,2")
    assert finding.lost_ms > 0


@pytest.mark.alone
def test_a_heavy_head_is_named(tmp_path):
    np.arange(16_000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    run = traced(
        tmp_path / "run",
        *SIZE,
        "--layers",
        "4",
        "--stage-layers",
        "2,2",
        "--vocab-size",
        "16000",
        "--data",
        str(tmp_path / "tokens.bin"),
    )
    finding = found_in(run)["uneven stage"]
    assert finding.text.startswith("pipeline rank 1 (stage 1: blocks 2-3, head, loss) computes ")
    assert "of which the head is 83%" in finding.text  # 2DV of 2DV + 2 (24 D^2 + 4 T D)
    assert finding.text.endswith("--stage-layers 4,0")


def by_hand(slow_steps, steps=3):
    """Three ranks of one stage: rank 1 takes 20 ms instead of 10 in some steps."""
    spans = [[span("F", 100 * step, 100 * step + (20 if (i, step) in slow_steps else 10),
                   step=step + 1) for step in range(steps)] for i in range(3)]  # fmt: skip
    return trace([[]] * 3, spans, end=100 * steps, steps=steps)


def test_a_rank_that_is_slower_than_its_stage_in_every_step_is_named():
    finding = found_in(by_hand({(1, 0), (1, 1), (1, 2)}))["slow rank"]
    assert finding.text == (
        "rank 1 on host1 computes 20.0 ms per step, the others of its stage 10.0 ms"
    )
    assert finding.lost_ms == pytest.approx(10)


def test_a_slow_rank_beside_a_stage_without_blocks_is_named():
    """Stage 0 has the embedding alone, whose FLOPs are 0."""

    class Light(Simulator):
        def _pass(self, rank, instr):
            if self.stage_layers[instr.stage]:
                yield from super()._pass(rank, instr)
            else:
                self._span(instr.kind, rank, self._work(rank, 0.2), instr.stage, instr.mb)

    run = Light(Run((("pp", 3),), stage_layers=(0, 2, 2), fault="F", rank=1, delay=200.0)).trace
    finding = found_in(run)["slow rank"]
    assert "rank 1 on host1 slow" in finding.text
    assert finding.lost_ms == pytest.approx(200, rel=0.05)


def test_no_rank_is_blamed_where_ranks_share_cores():
    run = by_hand({(1, 0), (1, 1), (1, 2)})
    for rank in run.ranks:
        rank.host, rank.cores = "host", (0, 1)
    assert found_in(run) == {}


def test_once_may_be_chance():
    assert found_in(by_hand({(1, 0), (1, 2)})) == {}
    one = by_hand({(1, 0)}, steps=1)
    assert found_in(one) == {}
    assert one.remarks() == [
        "one step is traced: what is slow in every step shows only with several"
    ]
