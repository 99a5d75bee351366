"""The tables of bench.claims follow the formulas, and their result files agree."""

import json

import pytest

from bench import results
from bench.claims import computed as claims
from bench.claims import measured

pytestmark = pytest.mark.slow
M, L = 8, claims.MODEL["layers"]


@pytest.fixture(scope="module")
def barriers():
    return {row["layout"]: row for row in claims.barriers()}


@pytest.fixture(scope="module")
def memory():
    return {row["layout"]: row for row in claims.memory()}


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_barriers_do_not_depend_on_its_size(barriers, tp):
    """A microbatch has 4 all-reduces a layer, embedding, head and loss; a step adds the norm."""
    assert barriers[f"tp {tp}"]["collectives_per_step"] == M * (4 * L + 3) + 1
    gather = barriers[f"tp {tp} (ffn-cut gather)"]
    assert gather["collectives_per_step"] == M * (6 * L + 3) + 1
    # Embedding 2, head and loss 3; the replicated gradients and the norm, once a step.
    sequence = barriers[f"tp {tp} (sequence-parallel)"]
    assert sequence["collectives_per_step"] == M * (10 * L + 5) + 2


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_pipeline_sends_two_messages_a_microbatch_and_rank(barriers, pp):
    row = barriers[f"pp {pp}"]
    assert row["messages_sent_per_step"] == (M if pp == 2 else 2 * M)  # an end stage sends one way
    assert row["collectives_per_step"] == 2  # the tied table at both ends, and the norm


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_messages_and_collectives_follow_the_formulas(barriers, cp):
    """Of a block and microbatch: 3(cp-1)+1 sends in a ring; besides, gradients and the norm."""
    sums = barriers[f"dp {cp}"]["collectives_per_step"]
    ring = barriers[f"cp {cp} (ring)"]
    assert ring["messages_sent_per_step"] == M * L * (2 * (cp - 1) + cp)
    assert ring["collectives_per_step"] == sums
    assert barriers[f"cp {cp} (gather)"]["collectives_per_step"] == sums + M * L * 3
    assert barriers[f"cp {cp} (ulysses)"]["collectives_per_step"] == sums + M * L * 4


def test_memory_is_pooled_by_tp_and_pp_and_not_by_dp(memory):
    rows, whole = memory, memory["tp 1"]
    assert rows["tp 4"]["weights_MiB"] < 0.27 * whole["weights_MiB"]
    assert rows["pp 4"]["weights_MiB"] < 0.27 * whole["weights_MiB"]
    assert rows["dp 4"]["weights_MiB"] == whole["weights_MiB"]
    assert rows["tp 4 (sequence-parallel)"]["stash_MiB"] < 0.7 * rows["tp 4"]["stash_MiB"]
    # The first of four stages keeps four microbatches of a quarter of the layers: all of it.
    assert rows["pp 4"]["stash_MiB"] == pytest.approx(whole["stash_MiB"], rel=0.02)


def test_two_layers_cut_as_a_pair_meet_half_as_often_for_a_fifth_of_the_bytes():
    rows = {(row["layer"], row["cut"], row["tp"]): row for row in claims.cuts()}
    for tp in (2, 4, 8):
        pair = rows["feed-forward", "pair", tp]
        assert (pair["forward"], pair["backward"]) == ("all_reduce", "all_reduce")
        for cut in ("output channels", "input channels"):
            alone = rows["feed-forward", cut, tp]
            assert (alone["barriers"], pair["barriers"]) == (4, 2)
            assert alone["payload_MiB"] == 5 * pair["payload_MiB"]  # F = 4 D, twice D + F


def test_tensor_parallelism_divides_flops_and_not_barriers_or_the_width_of_the_stream():
    """For B 2, T 128, D 256, F 1024 in float32: 24 B T D^2 + 4 B T^2 D FLOPs forward."""
    rows = {(row["part"], row["tp"]): row for row in claims.scaling()}
    alone, sum_bytes = rows["one block", 1], 2 * 128 * 256 * 4
    assert alone["MFLOP"] * 1e6 == 3 * (24 * 2 * 128 * 256**2 + 4 * 2 * 128**2 * 256)
    assert alone["weights_KiB"] * 1024 == 12 * 256**2 * 4
    for tp in (2, 4, 8):
        row = rows["one block", tp]
        assert row["MFLOP"] == alone["MFLOP"] / tp
        assert (row["times_ranks"], row["barriers"]) == (1, 4)
        assert row["sent_KiB"] * 1024 == 8 * (tp - 1) / tp * sum_bytes
        # Four arrays of the stream and the statistics of two norms stay whole.
        whole = 4 * sum_bytes + 4 * 2 * 128 * 4
        assert row["stash_KiB"] * 1024 == whole + (alone["stash_KiB"] * 1024 - whole) / tp


def test_result_files_without_times_are_what_the_code_says(barriers, memory):
    for name, rows in (
        ("barriers", list(barriers.values())),
        ("memory", list(memory.values())),
        ("cuts", claims.cuts()),
        ("scaling", claims.scaling()),
    ):
        path = results.ROOT / "bench" / "results" / f"claims_{name}.json"
        assert json.loads(path.read_text())["rows"] == rows, f"run python -m bench.claims {name}"


def test_experts_exchange_what_is_predicted():
    """Of 4 blocks and 2 microbatches; one rank with all experts cannot have more than others."""
    path = results.ROOT / "bench" / "results" / "claims_moe.json"
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ep"],) for row in rows] == measured.EXPERT_CASES
    assert [row["busiest_rank"] == 1 for row in rows] == [True, False, False]
    for row in rows:
        assert row["barriers"] == 4 * 2 * 7 * (row["ep"] > 1)
