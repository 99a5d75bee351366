"""Broken twins: bugs that distributed training programs have shipped with, planted on demand.

A twin is the program with one function replaced. A comparison with one rank must fail for it; what
each does to a run, and which check detects it, is on docs/bugs.md. No twin leaves a message pending
at the end of its step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple
from unittest import mock

from mpipar.comm.group import Comm
from mpipar.layers.linears import LINEARS
from mpipar.layers.loss import CrossEntropy
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.param import Param
from mpipar.pipeline.engine import Engine
from mpipar.run.data.rows import Rows
from mpipar.train.gradsync import GradSync
from mpipar.train.worker import Worker

GITHUB = "https://github.com/"
DP, PP, TP = {"dp": 2}, {"pp": 2}, {"tp": 2}


class Twin(NamedTuple):
    """A planted bug.

    cause: what is wrong. plant() -> a context manager that plants it. layouts: those on which a
    comparison fails. schedule, model: what it needs; the latter are changes of the small model.
    threads: where it was published, below GITHUB. desync: whether ranks make different calls, so
    that it hangs without --check-comm.
    """

    cause: str
    plant: Callable[[], AbstractContextManager]
    layouts: tuple[dict[str, int], ...]
    schedule: str = "1f1b"
    threads: tuple[str, ...] = ()
    model: Mapping[str, object] = {}
    desync: bool = False


def in_place_of(owner: type, name: str) -> Callable:
    """Turn function(the original method, self, ...) into a `Twin.plant` of that method."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def plant():
            plain = vars(owner)[name]
            return mock.patch.object(
                owner, name, lambda *given, **named: function(plain, *given, **named)
            )

        return plant

    return decorate


@in_place_of(Comm, "all_reduce")
def reduce_dropped(plain, self, x, name, op="sum"):
    """Leave the parts of one column cut's input gradient unsummed."""
    return x if name == "block1.ffn.up" else plain(self, x, name, op)


def bucket_dropped():
    """Reduce a copy of the third bucket, so that its sum is lost."""
    plain, calls = Comm.iall_reduce, []

    def iall_reduce(self, x, name):
        calls.append(name)
        return plain(self, x.copy() if len(calls) == 3 else x, name)

    return mock.patch.multiple(Comm, iall_reduce=iall_reduce)


@in_place_of(GradSync, "finish")
def reduce_doubled(plain, self):
    """Sum a stage's gradients once more when they are sums already."""
    plain(self)
    self.comms["dp"].all_reduce(self.flats[0].grad, "again")


def summed_early():
    """Post the buckets of a unit before its last weight gradient instead of after it."""

    def enter(self, unit):
        if self.passing in self.last_passes:
            self.gradsync.end_unit(self.passing.stage, unit, True)

    return mock.patch.multiple(Engine, enter=enter, leave=lambda self, unit: None)


@in_place_of(RowLinear, "forward")
def bias_on_every_rank(_plain, self, x, stash):
    """Add the bias of a row cut before the sum over ranks."""
    stash[self.name, "x"] = x
    return self.comm.all_reduce(self.ops.matmul_bias(x, self.w, self.b), self.name)


@in_place_of(GradSync, "finish")
def tied_twice(plain, self):
    """Sum the gradient of the tied table over its two ends a second time."""
    plain(self)
    for flat in self.flats:
        if "tie" in flat.groups:
            self.comms["tie"].all_reduce(flat.grad, "again")


@in_place_of(Comm, "all_reduce")
def tie_forgotten(plain, self, x, name, op="sum"):
    """Keep each pipeline end's own gradient of the tied table."""
    return x if self.axis == "tie" else plain(self, x, name, op)


@in_place_of(GradSync, "square_sums")
def norm_counts_copies(plain, self):
    """Add the squares of everything that a rank holds, copies of others' weights included."""
    for flat in self.flats:
        flat.norm_runs = [(True, 0, slice(flat.size))]
    return plain(self)


def weight_gradient_skipped():
    """Leave out the fifth weight gradient of a step."""
    calls, twins = [], ExitStack()
    for cut in LINEARS.values():
        if "backward_weight" not in vars(cut):
            continue  # its parent's, which is planted

        def backward_weight(self, stash, plain=cut.backward_weight):
            calls.append(self.name)
            if len(calls) == 5:
                stash.pop((self.name, "x"))
                stash.pop((self.name, "dy"))
            else:
                plain(self, stash)

        twins.enter_context(mock.patch.multiple(cut, backward_weight=backward_weight))
    return twins


@in_place_of(Engine, "run")
def microbatches_swapped(plain, self, program, get_batch, training=True):
    """Let the last stage compare microbatch 0 with the targets of microbatch 1."""
    if self.comm.group_rank == 1 and self.comm.size == 2:
        return plain(self, program, lambda mb: get_batch(mb ^ 1), training)
    return plain(self, program, get_batch, training)


@in_place_of(Engine, "_receive")
def buffer_aliased(plain, self, instr):
    """Receive all messages of a stage in one buffer, which layers still need."""
    if not hasattr(self, "buffer"):
        shape = self.stages[instr.stage].in_shape(self.get_batch(instr.mb))
        self.buffer = self.ops.empty(shape)
    empty, self.ops.empty = self.ops.empty, lambda shape, label: self.buffer
    try:
        plain(self, instr)
    finally:
        self.ops.empty = empty


@in_place_of(Worker, "gradients")
def loss_of_a_microbatch(plain, self, step, get_batch, *votes):
    """Divide the loss by the tokens of a microbatch instead of those of the step."""
    plainly = self.own_tokens
    self.own_tokens //= self.schedule.num_microbatches
    try:
        return plain(self, step, get_batch, *votes)
    finally:
        self.own_tokens = plainly


@in_place_of(CrossEntropy, "backward_input")
def loss_times_cp(plain, self, dy, stash):
    """Multiply the gradient of the loss by the two ranks of cp, as for a mean over them."""
    self.factor.value *= 2
    try:
        return plain(self, dy, stash)
    finally:
        self.factor.value /= 2


@in_place_of(Comm, "all_reduce")
def tp_sums_dropped(plain, self, x, name, op="sum"):
    """Do not sum gradients of whole weights, of which each rank of tp computes a part, over tp."""
    return x if name == "grads.tp" else plain(self, x, name, op)


@in_place_of(GradSync, "finish")
def experts_doubled(plain, self):
    """Multiply the gradients of experts on two ranks by two, as if ranks held copies of them."""
    plain(self)
    for flat in self.flats:
        if flat.groups[-1] == "expert_data":
            self.ops.scale(flat.grad, 2.0)


@in_place_of(Comm, "all_reduce")
def shared_heads_dropped(plain, self, x, name, op="sum"):
    """Keep each rank's own gradient of a head of keys and values that two ranks hold."""
    return x if self.axis == "kv" else plain(self, x, name, op)


@in_place_of(Param, "initial_rows")
def same_shards(plain, self, *given):
    """Let every rank draw its shard of a weight as if it were the first one."""
    box, self.box = self.box, tuple((0, stop - start) for start, stop in self.box)
    try:
        yield from plain(self, *given)
    finally:
        self.box = box


@in_place_of(Rows, "train")
def same_rows(plain, self, step, mb):
    """Let every replica of the model read the rows of the first one."""
    place, self.dp_rank = self.dp_rank, 0
    try:
        return plain(self, step, mb)
    finally:
        self.dp_rank = place


@in_place_of(GradSync, "clip")
def own_norm(plain, self, norm, limit):
    """Clip on every rank by the norm of what that rank holds."""
    own = self.ops.to_floats([part for part, _ in self.square_sums()])
    plain(self, math.sqrt(sum(own)), limit)


@in_place_of(Engine, "_backward")
def wiped(plain, self, instr):
    """Set gradients to zero before each backward pass, so that only the last microbatch counts."""
    self.gradsync.zero()
    plain(self, instr)


@in_place_of(GradSync, "buckets")
def buckets_crossed(plain, self, flat, unit):
    """Let the second rank sum the first two buckets of a unit in the other order."""
    found = plain(self, flat, unit)
    if self.comms[flat.groups[-1]].group_rank == 1 and len(found) > 2:
        found[:2] = found[1::-1]
    return found


@in_place_of(GradSync, "buckets")
def unit_left_out(plain, self, flat, unit):
    """Let the second rank skip a block, and sum no gradients of it."""
    skips = unit == 1 and self.comms[flat.groups[-1]].group_rank > 0
    return [] if skips else plain(self, flat, unit)


TWINS = {
    "aliased buffer": Twin(
        "a receive buffer is used again before backward has read it",
        buffer_aliased,
        (PP,),
        "gpipe",
        threads=("deepspeedai/DeepSpeed/issues/2800",),
    ),
    "swapped rows": Twin(
        "the last stage reads the rows of a different microbatch than the first",
        microbatches_swapped,
        (PP,),
        threads=("deepspeedai/DeepSpeed/issues/5729",),
    ),
    "bias times tp": Twin(
        "the bias of a row cut is added on every rank, before the sum",
        bias_on_every_rank,
        (TP,),
        threads=("huggingface/text-generation-inference/issues/1036", "awslabs/slapo/issues/10"),
    ),
    "sum left out": Twin(
        "one product leaves out the sum over its tensor-parallel group",
        reduce_dropped,
        (TP,),
        threads=("NovaSky-AI/SkyRL/pull/1886",),
    ),
    "own tokens": Twin(
        "the loss is divided by the tokens of a microbatch, not of the step",
        loss_of_a_microbatch,
        (PP,),
        threads=("karpathy/nanoGPT/issues/168", "meta-pytorch/torchtune/pull/1875"),
    ),
    "lost bucket": Twin(
        "the sum of one gradient bucket is lost",
        bucket_dropped,
        (DP,),
        threads=("pytorch/pytorch/issues/109191",),
    ),
    "summed twice": Twin(
        "gradients are summed over the replicas twice",
        reduce_doubled,
        (DP,),
        threads=("NVIDIA/Megatron-LM/issues/775",),
    ),
    "summed early": Twin(
        "gradients are summed before the last weight gradient is in them",
        summed_early,
        (DP,),
        threads=("deepspeedai/DeepSpeed/issues/8061",),
    ),
    "tie forgotten": Twin(
        "the two ends of the pipeline do not sum the gradient of the tied table",
        tie_forgotten,
        (PP,),
        threads=("uw-syfi/piper/issues/13",),
    ),
    "tie twice": Twin(
        "the gradient of the tied table is summed over both ends twice",
        tied_twice,
        (PP,),
        threads=("NVIDIA/Megatron-LM/issues/844",),
    ),
    "norm of copies": Twin(
        "the gradient norm counts tensors that several ranks hold once per rank",
        norm_counts_copies,
        (PP, TP),
        threads=("NVIDIA-NeMo/RL/pull/3788", "ROCm/TransformerEngine/pull/715"),
    ),
    "lost W": Twin(
        "one weight gradient of one microbatch is left out",
        weight_gradient_skipped,
        (PP,),
    ),
    "cp scale": Twin(
        "the loss is multiplied by the ranks of cp before its gradients are summed over them",
        loss_times_cp,
        ({"cp": 2},),
        model={"seq_len": 8},
        threads=("NVIDIA/Megatron-LM/issues/906", "NVIDIA/Megatron-LM/pull/3959"),
    ),
    "norms of sp": Twin(
        "gradients of norms are not summed over tp where tokens are cut",
        tp_sums_dropped,
        (TP,),
        model={"sequence_parallel": True},
        threads=("NVIDIA/Megatron-LM/issues/1446", "EleutherAI/gpt-neox/pull/1259"),
    ),
    "router": Twin(
        "gradients of a router are not summed over tp",
        tp_sums_dropped,
        (TP,),
        model={"experts": 4},
        threads=("huggingface/transformers/pull/48205", "huggingface/transformers/issues/48687"),
    ),
    "experts": Twin(
        "gradients of experts are scaled as if ranks held copies of them",
        experts_doubled,
        ({"dp": 2, "ep": 2},),
        model={"experts": 4},
        threads=("pytorch/pytorch/issues/160285",),
    ),
    "shared kv": Twin(
        "ranks that hold one head of keys and values do not sum its gradient",
        shared_heads_dropped,
        (TP,),
        model={"arch": "llama", "kv_heads": 1},
        threads=("bigcode-project/Megatron-LM/pull/37",),
    ),
    "same shards": Twin(
        "all ranks of tp draw the same initial numbers for their shards",
        same_shards,
        (TP,),
        threads=("InternLM/InternLM/pull/405", "modelscope/ms-swift/pull/7944"),
    ),
    "same rows": Twin(
        "every replica reads the same rows",
        same_rows,
        (DP,),
        threads=("yaak-ai/rbyte/pull/106", "vllm-project/speculators/pull/427"),
    ),
    "own norm": Twin(
        "each rank clips by the norm of its own gradients",
        own_norm,
        (TP, PP),
        model={"tied": False},
        threads=(
            "bigscience-workshop/Megatron-DeepSpeed/pull/270",
            "pytorch/torchtitan/issues/596",
        ),
    ),
    "wiped": Twin(
        "gradients are set to zero between the microbatches of a step",
        wiped,
        (PP,),
        threads=("NVIDIA-NeMo/Automodel/pull/3530",),
    ),
    "crossed": Twin(
        "two ranks sum their buckets in different orders",
        buckets_crossed,
        (DP,),
        threads=("deepspeedai/DeepSpeed/issues/2343",),
    ),
    "left out": Twin(
        "a rank that has not used a layer leaves its sums out",
        unit_left_out,
        (DP,),
        threads=("pytorch/pytorch/issues/158719", "pytorch/pytorch/issues/64629"),
        desync=True,
    ),
}
