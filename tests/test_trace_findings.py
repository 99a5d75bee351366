"""Only planted faults are named: an uneven stage, a heavy head, a slow rank, a hot expert."""

import re

import numpy as np
import pytest
from one_rank import fresh
from planted_delays import Run, Simulator
from program import TEXT
from trace_cases import blocking, span, trace
from traced_runs import traced

from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.record import Load
from mpipar.trace.analysis import analyse

# Large enough that products, not Python, take a stage's time.
SIZE = [
    *TEXT,
    *"""--d-model 128 --heads 4 --seq-len 64 --batch-size 8 --num-microbatches 4
    --layout pp=2 --schedule gpipe --steps 5 --trace 3:5 --sample-tokens 0""".split(),
]


def found_in(run):
    return {finding.kind: finding for finding in analyse(run).findings}


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
    finding = found_in(run)["heavy head"]
    assert finding.text.startswith("pipeline rank 1 (stage 1: blocks 2-3, head, loss) computes ")
    assert "the head is 83% of its FLOPs" in finding.text  # 2DV of 2DV + 2 (24 D^2 + 4 T D)
    assert finding.text.endswith("--stage-layers 4,0")


def by_hand(slow_steps, steps=3):
    """Three ranks of one stage: rank 1 takes 20 ms instead of 10 in some steps."""
    spans = [[span("F", 100 * step, 100 * step + (20 if (i, step) in slow_steps else 10),
                   step=step + 1) for step in range(steps)] for i in range(3)]  # fmt: skip
    return trace([[]] * 3, spans, end=100 * steps, steps=steps)


def test_a_rank_that_is_slower_than_its_stage_in_every_step_is_named():
    finding = found_in(by_hand({(1, 0), (1, 1), (1, 2)}))["slow rank"]
    assert finding.text == (
        "rank 1 on host1 computes 20.0 ms per step, the others of its stage"
        " 10.0 ms, most of it in the forward of stage 0"
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


EXPERTS = [
    "--experts",
    "4",
    "--experts-per-token",
    "1",
    "--expert-ffn",
    "512",
    "--layers",
    "2",
    "--layout",
    "dp=2,ep=2",
    "--num-microbatches",
    "2",
    "--router-balance",
    "bias",
]


@pytest.mark.slow
def test_a_hot_expert_alone_is_named(tmp_path):
    """Weights whose bias for expert 0 is more than any probability send every token there."""
    shape = {"experts": 4, "experts_per_token": 1, "expert_ffn": 512, "router_balance": "bias"}
    worker = fresh(**shape, layers=2, d_model=128, heads=4, seq_len=64, vocab_size=256, ffn=None)
    for param in worker.stages[0].params:
        if param.sign_rate:
            param.data[0] = 2.0
    checkpoint.save(worker, tmp_path / "w")
    words = [*EXPERTS, "--init-from", str(tmp_path / "w")]
    found = found_in(traced(tmp_path / "run", *SIZE, *words))
    assert "slow rank" not in found
    text = found["hot expert"].text
    assert re.fullmatch(
        r"expert 0 of block [01] received 4\.0 times the mean; rank 0 on \S+ made"
        r" the others wait [\d.]+ ms per step",
        text,
    ), text
    assert found["hot expert"].lost_ms > 0


def by_experts(rows, wait_ms):
    """Two ranks with two experts each: rank 0 lets rank 1 wait in each of two steps."""

    def exchange(rank, step):
        posted = 100 * step + (10 if rank else 10 + wait_ms)
        return blocking(
            "all_to_allv",
            "block2.moe.combine",
            "expert",
            posted,
            100 * step + 11 + wait_ms,
            step=step + 1,
        )

    groups = [dict.fromkeys(("tp", "pp", "world", "expert"), (0, 1))] * 2
    made = trace(
        [[exchange(rank, step) for step in (0, 1)] for rank in (0, 1)],
        end=200,
        groups=groups,
        steps=2,
    )
    for rank in made.ranks:
        rank.loads = [
            Load(
                "block2.moe",
                2 * rank.world_rank,
                step,
                0,
                0,
                rows[step - 1][2 * rank.world_rank :][:2],
            )
            for step in (1, 2)
        ]
    return made


HOT = [[6, 8, 1, 1], [2, 10, 2, 2]]  # expert 1: 2 and 2.5 times the mean


@pytest.mark.parametrize(
    ("rows", "wait_ms", "named"),
    [
        (HOT, 31, True),
        (HOT, 2, False),  # nobody waits for long
        ([HOT[0], [4, 4, 4, 4]], 31, False),  # in one step alone
        ([[5, 5, 5, 1]] * 2, 31, False),
    ],
)  # 1.25 times the mean: rank 0 is late for another reason
def test_a_hot_expert_is_named_if_others_wait(rows, wait_ms, named):
    found = found_in(by_experts(rows, wait_ms))
    assert ("hot expert" in found) == named
    if named:
        assert found["hot expert"].text == (
            "expert 1 of block 2 received 2.0 times the mean; rank 0 on host0 made the others wait"
            " 31.0 ms per step"
        )
        assert found["hot expert"].lost_ms == pytest.approx(31)


def test_once_may_be_chance():
    assert found_in(by_hand({(1, 0), (1, 2)})) == {}
    one = by_hand({(1, 0)}, steps=1)
    assert found_in(one) == {}
    assert one.remarks() == [
        "one step is traced: what is slow in every step shows only with several"
    ]
