"""The law of equality must fail for known bugs: each twin is a function of what it replaces.

A twin gets the plain function and its arguments, see `plant`. Those of docs/bugs.md are in
test_broken_twins.py.
"""

from dataclasses import asdict

import numpy as np
import pytest
from drawn import MODELS, ROWS, Halves
from small_model import (
    DP,
    EVEN,
    EXPERTS,
    MODEL,
    PP,
    TP,
    WORLD,
    assert_caught,
    assert_equals_known,
    called,
    computed_once,
    cut_model,
    plant,
    small_config,
)

from mpipar.comm.grid import Grid, token_pieces
from mpipar.comm.group import Comm, Pending
from mpipar.comm.recorder import NO_ENTRY
from mpipar.comm.transport import Done
from mpipar.config.model import ModelConfig
from mpipar.layers.norm import Residual
from mpipar.layers.parallel import allgather_attention, ring_attention
from mpipar.layers.parallel.expert_dispatch import ExpertDispatch
from mpipar.layers.parallel.sequence import SequenceShardedTokens
from mpipar.layers.param import Param
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.rotation import Rotation
from mpipar.models import decoder
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.pipeline.engine import Engine
from mpipar.run.data import rows as data_rows
from mpipar.train.optim import Optimizer
from mpipar.train.zero import (
    FullyShardedUnits,
    ReduceScatterGradSync,
    ShardedFlatParams,
    ShardedGradSync,
    largest,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# --- tokens that are cut between the products


def not_reduced(plain, self, x, name, op="sum"):
    return x if name == "grads.tp" else plain(self, x, name, op)


def reduced_twice(plain, self, x, name, op="sum"):
    return plain(self, plain(self, x, name, op) if name == "grads.tp" else x, name, op)


def positions_of_the_first_rank(_plain, self, positions):
    return positions[: self.length(len(positions))]


def padding_that_is_not_zero(plain, self, shape, dtype=None, label="stash"):
    """Padding after the last token must not reach a gradient."""
    x = plain(self, shape, dtype, label)
    if label == "buffers" and x.dtype.kind == "f":
        x.fill(1.0)
    return x


# --- tokens that are cut inside attention


def keys_that_do_not_come_home(plain, self, x, peer, tag, name):
    lost = self.axis == "cp" and tag == ring_attention.GRADIENTS
    return plain(self, x * 0.0 if lost else x, peer, tag, name)


def added_without_rescaling(plain, self, y, stats, y2, stats2):
    both = y + y2
    plain(self, y, stats, y2, stats2)
    y[...] = both


def not_summed_over_a_row(plain, self, x, name):
    return plain(self, x * 1.0 if self.axis == "data" else x, name)


def one_run_of_tokens(_plain, tokens, method, *place):
    """The data gives each rank one run of tokens, while attention expects the zig-zag."""
    return token_pieces(tokens, "ulysses", *place)


def keys_in_the_order_of_the_ranks(_plain, tokens, method, *place):
    return [(slice(0, tokens // WORLD.size), *token_pieces(tokens, "ulysses", *place))]


# --- heads, experts and residuals


def replicas_without_their_sum(plain, self, x, name, op="sum"):
    return x if self.axis == "kv" else plain(self, x, name, op)


def replicas_that_count_twice(plain, self, *arguments, **named):
    plain(self, *arguments, **named)
    self.owner = self.owner or bool(self.placement)


def positions_of_a_rank_s_own_tokens(plain, self, x, positions):
    """Counted from the first token that the rank holds, not from the start of the row."""
    plain(self, x, positions - positions[0])


def summed_over_data(plain, self, group, cut):
    """Experts of other ranks are added as if they were copies."""
    return plain(self, group, cut if group == "tp" else ())


def weighted_twice(plain, self, rows, plan, weighted):
    probs = plan.probs**2 if self.comm.size > 1 else plan.probs
    return plain(self, rows, plan._replace(probs=probs), weighted=weighted)


def in_order_of_sending(plain, self, rows, plan, weighted):
    """Results are not put back to their tokens."""
    if self.comm.size > 1:
        plan = plan._replace(places=np.arange(plan.places.size).reshape(plan.places.shape))
    return plain(self, rows, plan, weighted=weighted)


def balanced_by_microbatch(plain, self, dlogits, logits, loads, factor):
    """One rank has it, too. Its microbatches have other rows than those of two."""
    plain(self, dlogits, logits, np.broadcast_to(loads.mean(axis=0), loads.shape), factor)


def router_detached(plain, self, factors, plan):
    """Its gradient does not cross the border between ranks."""
    return plain(self, factors * (self.comm.size == 1), plan)


def counts_of_another(plain, self, choice):
    """Distribute rows among this rank's experts by the counts of the previous microbatch."""
    found = plain(self, choice)
    if self.comm.size == 1:
        return found
    first = min(LAST_COUNTS.get(self.name, found.counts)[0], sum(found.counts))
    LAST_COUNTS[self.name] = found.counts
    return found._replace(counts=[first, sum(found.counts) - first])


LAST_COUNTS = {}


# --- ZeRO and recomputation


def piece_of_the_next_rank(plain, self, run, place):
    return plain(self, run, (place + 1) % self.group.size)


def weights_gathered_before_the_update(plain, self, lr, step):
    if not self.flats[0].level:  # on one rank
        plain(self, lr, step)
    for flat in self.flats if self.flats[0].level else ():
        for segment in range(len(flat.segments)):
            flat.gather(segment).wait()
            self.rules[flat.rule].update(flat, segment, lr, step)


def norm_of_the_first_rank_s_pieces(plain, self):
    return [(part, counts and self.comms["data"].group_rank == 0) for part, counts in plain(self)]


def two_units_in_one_buffer(_plain, self):
    size = largest(needs for units in self.needs.values() for needs in units)
    return [self.ops.empty((size,), label="weights")] * 2


def no_gather_before_the_input_gradient(plain, self, stage, unit, room):
    """The buffer still has what it held before, which is another unit's."""
    if self.needs[stage][unit][0][0].group.recorder.phase == "F":
        plain(self, stage, unit, room)
        return
    first, posted = 0, []
    for flat, number in self.needs[stage][unit]:
        whole = room[first : first + flat.lengths[number]]
        first += whole.size
        posted.append((Pending(Done(), list(NO_ENTRY), whole), flat, number, whole))
    self.coming[stage, unit] = posted


def means_in_place_of_sums(plain, self):
    plain(self)
    self._scale(1 / self.comms["data"].size)


def gradients_of_another_unit_in_the_scratch_buffer(plain, self, stage, unit):
    kept, self.ops.fill = self.ops.fill, lambda x, value: None
    plain(self, stage, unit)
    self.ops.fill = kept


def stash_of_another_microbatch(plain, self, dy, stash):
    dx = plain(self, dy, stash)
    before, self.newest = getattr(self, "newest", None), stash[self, "inner"]
    if before:  # W has not read it yet
        before.update(self.newest)
    return dx


def input_in_a_receive_buffer(plain, self, instr):
    """The next microbatch arrives where the input of a block lies that runs forward again."""
    x = plain(self, instr)
    if instr.kind != "F" or x is None:
        return x
    self.buffer = getattr(self, "buffer", x)
    self.ops.copy(self.buffer, x)
    return self.buffer


def result_in_place_of_the_input(_plain, self, x, stash):
    inner = stash.inner()
    for layer in self.layers:
        x = layer.forward(x, inner)
    stash[self, "x"] = x
    return x


def of_tokens(**options):
    """Tokens cut over all ranks."""
    return {"layout": (1, 1, WORLD.size), "model": cut_model(**options)}


# 8 heads of width 3; 16 tokens are 2 pieces for each rank.
LONG = ModelConfig(layers=4, d_model=24, heads=8, ffn=31, seq_len=16, vocab_size=29)
SMALL = ModelConfig(layers=4, d_model=12, heads=4, ffn=31, seq_len=8, vocab_size=29)
RING, GATHER, ULYSSES = (
    {"model": LONG, "cp": 2, "cp_attention": method} for method in ("ring", "gather", "ulysses")
)
ROUTED = {"layout": DP, "model": EXPERTS, "ep": 2}
SHARED_HEADS = {"layout": TP, "model": MODELS["tied"], "rows_per_mb": 4}
ROTATED = {"model": MODELS["llama"], "rows_per_mb": 4, "cp": 2, "cp_attention": "ulysses"}
ONE, THREE = ({"layout": DP, "model": SMALL, "zero": level} for level in (1, 3))
AGAIN = {"num_microbatches": 4, "recompute": "block"}
CUT_TOKENS = [
    (Comm, "all_reduce", not_reduced, of_tokens(norm="layer")),
    (Comm, "all_reduce", not_reduced, of_tokens(norm="rms")),
    (Comm, "all_reduce", reduced_twice, of_tokens()),
    (SequenceShardedTokens, "positions", positions_of_the_first_rank, of_tokens()),
    (NumpyOps, "zeros", padding_that_is_not_zero, of_tokens()),
    (NumpyOps, "zeros", padding_that_is_not_zero, of_tokens(tp_matmul="ring")),
]
TWINS = {  # by ranks: what is replaced, by what, and values of the layout in which it must show
    1: [  # a step that ends in the middle leaves no message
        (ActivationRecompute, "forward", result_in_place_of_the_input, AGAIN),
    ],
    2: [
        *CUT_TOKENS,
        (Comm, "isend", keys_that_do_not_come_home, RING),
        (NumpyOps, "attention_merge", added_without_rescaling, RING),
        (Comm, "iall_reduce", not_summed_over_a_row, RING),
        (Comm, "iall_reduce", not_summed_over_a_row, GATHER),
        (Comm, "iall_reduce", not_summed_over_a_row, ULYSSES),
        (data_rows, "token_pieces", one_run_of_tokens, RING),
        (data_rows, "token_pieces", one_run_of_tokens, GATHER),
        (allgather_attention, "held_and_whole", keys_in_the_order_of_the_ranks, GATHER),
        (Comm, "all_reduce", replicas_without_their_sum, SHARED_HEADS),
        (Param, "__init__", replicas_that_count_twice, SHARED_HEADS),
        (Rotation, ("forward", "backward"), positions_of_a_rank_s_own_tokens, ROTATED),
        (Grid, "remaining_group", summed_over_data, ROUTED),
        (ExpertDispatch, "combine", weighted_twice, ROUTED),
        (ExpertDispatch, "combine", in_order_of_sending, ROUTED),
        (NumpyOps, "balance_backward_input", balanced_by_microbatch, ROUTED),
        (ExpertDispatch, "factors_back", router_detached, ROUTED),
        (ExpertDispatch, "plan", counts_of_another, ROUTED),
        (ShardedFlatParams, "piece_in", piece_of_the_next_rank, ONE),
        (ShardedFlatParams, "piece_in", piece_of_the_next_rank, THREE),
        (Optimizer, "step", weights_gathered_before_the_update, ONE),
        (ReduceScatterGradSync, "square_sums", norm_of_the_first_rank_s_pieces, ONE),
        (FullyShardedUnits, "make_room", two_units_in_one_buffer, THREE),
        (FullyShardedUnits, "post", no_gather_before_the_input_gradient, THREE),
        (ReduceScatterGradSync, "finish", means_in_place_of_sums, ONE),
        (ShardedGradSync, "finish", means_in_place_of_sums, THREE),
        (ShardedGradSync, "begin_unit", gradients_of_another_unit_in_the_scratch_buffer, THREE),
        (
            ActivationRecompute,
            "backward_input",
            stash_of_another_microbatch,
            AGAIN | {"layout": PP, "model": SMALL, "schedule": "zb-h1"},
        ),
        (
            Engine,
            "_take",
            input_in_a_receive_buffer,
            AGAIN | {"layout": PP, "model": MODEL, "schedule": "gpipe"},
        ),
    ],
    3: CUT_TOKENS,
}


@pytest.mark.ranks(*TWINS)
@pytest.mark.parametrize(
    ("owner", "names", "twin", "values"), TWINS.get(WORLD.size, []), ids=called
)
def test_a_planted_bug_is_seen(owner, names, twin, values, monkeypatch):
    for name in (names,) if isinstance(names, str) else names:
        plant(monkeypatch, owner, name, twin)
    assert_caught(small_config(**values), match=r"tensors differ|in the stash")


@pytest.mark.ranks(2)
def test_a_gradient_that_does_not_flow_around_a_branch_is_seen(monkeypatch):
    """One rank has the bug, too: its true tensors are kept before."""
    for name, row in ROWS.items():
        monkeypatch.setitem(decoder.BLOCKS, name, row)
    config = small_config(model=Halves(**asdict(EVEN)), layout=PP, **AGAIN)
    assert_equals_known(config)

    def around_no_branch(_plain, self, dy, stash):
        return self.norm.backward_input(self.branches[0].backward_input(dy, stash), stash)

    plant(monkeypatch, Residual, "backward_input", around_no_branch)
    assert_caught(config, computed_once)
