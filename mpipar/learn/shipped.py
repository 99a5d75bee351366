"""More bugs that distributed training programs have shipped with, planted like those of twins.py.

Each was reported in a thread of a program that people train with. No exercise asks for them:
docs/bugs.md lists all, what they do to a run, and which check detects them.
"""

from __future__ import annotations

import math

from mpipar.comm.group import Comm
from mpipar.data.rows import Rows
from mpipar.layers.loss import CrossEntropy
from mpipar.layers.param import Param
from mpipar.learn.replaced import in_place_of
from mpipar.learn.twins import DP, PP, TP, Twin
from mpipar.pipeline.engine import Engine
from mpipar.train.gradsync import GradSync


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
    own = self.ops.numbers([part for part, _ in self.square_sums()])
    plain(self, math.sqrt(sum(own)), limit)


@in_place_of(Engine, "_backward")
def wiped(plain, self, instr):
    """Set gradients to zero before each backward pass, so that only the last microbatch counts."""
    self.gradsync.zero()
    plain(self, instr)


@in_place_of(GradSync, "post")
def buckets_crossed(_, self, flat, unit):
    """Let the second rank sum the first two buckets of a unit in the other order."""
    run, data = flat.units[unit], self.comms[flat.groups[-1]]
    firsts = list(range(run.start, run.stop, self.bucket))
    if data.index == 1 and len(firsts) > 2:
        firsts[:2] = firsts[1::-1]
    for first in firsts:
        piece = flat.grad[first : min(first + self.bucket, run.stop)]
        self.pending.append(data.iall_reduce(piece, "grads.bucket"))


@in_place_of(GradSync, "post")
def unit_left_out(plain, self, flat, unit):
    """Let the second rank skip a block, and sum no gradients of it."""
    if unit != 1 or self.comms[flat.groups[-1]].index == 0:
        plain(self, flat, unit)


SHIPPED = {
    "cp scale": Twin(
        "the loss is multiplied by the ranks of cp before its gradients are summed over them",
        loss_times_cp,
        "A sum over ranks that share a row needs no such factor; a mean would. All gradients are"
        " doubled, and the printed loss is not.",
        ({"cp": 2},),
        model={"seq_len": 8},
        threads=("NVIDIA/Megatron-LM/issues/906", "NVIDIA/Megatron-LM/pull/3959"),
    ),
    "norms of sp": Twin(
        "gradients of norms are not summed over tp where tokens are cut",
        tp_sums_dropped,
        "With sequence parallelism a norm sees only the tokens of its rank. Its copies get"
        " different gradients and drift apart.",
        (TP,),
        model={"sequence_parallel": True},
        threads=("NVIDIA/Megatron-LM/issues/1446", "EleutherAI/gpt-neox/pull/1259"),
    ),
    "router": Twin(
        "gradients of a router are not summed over tp",
        tp_sums_dropped,
        "Each rank of tp has a part of every expert, so the router's gradient is partial. The"
        " loss is right, and the copies of the router drift apart.",
        (TP,),
        model={"experts": 4},
        threads=("huggingface/transformers/pull/48205", "huggingface/transformers/issues/48687"),
    ),
    "experts": Twin(
        "gradients of experts are scaled as if ranks held copies of them",
        experts_doubled,
        "An expert on one rank has seen the tokens of all ranks, so its gradient is complete.",
        ({"dp": 2, "ep": 2},),
        model={"experts": 4},
        threads=("pytorch/pytorch/issues/160285",),
    ),
    "shared kv": Twin(
        "ranks that hold one head of keys and values do not sum its gradient",
        shared_heads_dropped,
        "Each copy of the head gets gradients only from its own queries, and the copies drift"
        " apart.",
        (TP,),
        model={"arch": "llama", "kv_heads": 1},
        threads=("bigcode-project/Megatron-LM/pull/37",),
    ),
    "same shards": Twin(
        "all ranks of tp draw the same initial numbers for their shards",
        same_shards,
        "The weights are not those of one rank, and every second neuron repeats another one. Each"
        " step after that is right.",
        (TP,),
        threads=("InternLM/InternLM/pull/405", "modelscope/ms-swift/pull/7944"),
    ),
    "same rows": Twin(
        "every replica reads the same rows",
        same_rows,
        "Two replicas do the work of one, and the batch is half as large as stated. They stay"
        " identical, so only `verify` sees it.",
        (DP,),
        threads=("yaak-ai/rbyte/pull/106", "vllm-project/speculators/pull/427"),
    ),
    "own norm": Twin(
        "each rank clips by the norm of its own gradients",
        own_norm,
        "Ranks scale by different factors. Copies of one tensor drift apart; where there are none,"
        " parts of the model take steps of another length, and nothing shows it.",
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
        "Only the last microbatch trains the model. The loss is summed separately, so it looks"
        " right.",
        (PP,),
        threads=("NVIDIA-NeMo/Automodel/pull/3530",),
    ),
    "crossed": Twin(
        "two ranks sum their buckets in different orders",
        buckets_crossed,
        "Equal sizes meet, so no call fails. Each rank stores a sum of gradients of different"
        " weights.",
        (DP,),
        threads=("deepspeedai/DeepSpeed/issues/2343",),
    ),
    "left out": Twin(
        "a rank that has not used a layer leaves its sums out",
        unit_left_out,
        "From there on each sum of this rank is paired with a different one of its neighbour. The"
        " job hangs, or ends with garbage.",
        (DP,),
        threads=("pytorch/pytorch/issues/158719", "pytorch/pytorch/issues/64629"),
        desync=True,
    ),
}
