"""Twelve broken twins: known bugs of distributed training programs, each planted on demand.

A twin is the program with one function replaced. A comparison with one rank must fail for each of
them, which the tests prove. Learners see what fails, and look for the bug.

No twin leaves a message pending at the end of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from mpipar.comm.group import Comm
from mpipar.layers.linear import Linear
from mpipar.learn.replaced import in_place_of, replaced
from mpipar.partition import row
from mpipar.pipeline.engine import Engine
from mpipar.train.gradsync import GradSync
from mpipar.train.worker import Worker

GITHUB = "https://github.com/"
DP, PP, TP = {"dp": 2}, {"pp": 2}, {"tp": 2}


class Twin(NamedTuple):
    """A planted bug.

    cause: what is wrong. plant() -> a context manager that plants it. lesson: why its symptoms are
    what they are. layouts: those on which a comparison fails. schedule, model: what it needs; the
    latter are changes of the small model. threads: where it was published, below GITHUB. desync:
    whether ranks make different calls, so that it hangs without --check-comm.
    """

    cause: str
    plant: Callable[[], AbstractContextManager]
    lesson: str
    layouts: tuple[dict[str, int], ...]
    schedule: str = "1f1b"
    threads: tuple[str, ...] = ()
    model: Mapping[str, object] = {}
    desync: bool = False


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

    return replaced(Comm, iall_reduce=iall_reduce)


@in_place_of(GradSync, "finish")
def reduce_doubled(plain, self):
    """Sum a stage's gradients once more when they are sums already."""
    plain(self)
    self.comms["dp"].all_reduce(self.flats[0].grad, "again")


def summed_early():
    """Post the buckets of a unit before its last weight gradient instead of after it."""

    def enter(self, unit):
        if self.passing in self.last_passes:
            self.gradsync.start_unit(self.passing.stage, unit)

    return replaced(Engine, enter=enter, leave=lambda self, unit: None)


@in_place_of(Linear, "forward")
def bias_on_every_rank(plain, self, x, stash, residual=None):
    """Add the bias of a row cut before the sum over ranks."""
    stash[self.name, "x"] = x
    if self.cut is not row:
        return plain(self, x, stash, residual)
    y = self.ops.matmul(x, self.matrix("data"))
    y = self.comm.all_reduce(self.ops.bias_forward(y, self.bias("data")), self.name)
    return y if residual is None else self.ops.accumulate(y, residual)


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
        flat.counted = [(True, 0, slice(flat.size))]
    return plain(self)


def weight_gradient_skipped():
    """Leave out the fifth weight gradient of a step."""
    plain, calls = Linear.backward_weight, []

    def backward_weight(self, stash):
        calls.append(self.name)
        if len(calls) == 5:
            stash.pop((self.name, "x"))
            stash.pop((self.name, "dy"))
        else:
            plain(self, stash)

    return replaced(Linear, backward_weight=backward_weight)


@in_place_of(Engine, "run")
def microbatches_swapped(plain, self, program, get_batch, training=True):
    """Let the last stage compare microbatch 0 with the targets of microbatch 1."""
    if self.comm.index == 1 and self.comm.size == 2:
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
    self.num_tokens //= self.schedule.num_microbatches
    try:
        return plain(self, step, get_batch, *votes)
    finally:
        self.num_tokens *= self.schedule.num_microbatches


TWINS = {
    "5d": Twin(
        "a receive buffer is used again before backward has read it",
        buffer_aliased,
        "With one microbatch in flight nothing differs. With more, backward finds the newest input"
        " under every microbatch, and only weights that read it get wrong gradients.",
        (PP,),
        "gpipe",
        threads=("deepspeedai/DeepSpeed/issues/2800",),
    ),
    "5e": Twin(
        "the last stage reads the rows of a different microbatch than the first",
        microbatches_swapped,
        "Tokens of one row meet the targets of another. The loss is wrong, and so are all"
        " gradients; no shape is.",
        (PP,),
        threads=("deepspeedai/DeepSpeed/issues/5729",),
    ),
    "6c": Twin(
        "the bias of a row cut is added on every rank, before the sum",
        bias_on_every_rank,
        "The sum over q ranks counts the bias q times. Where biases start at zero, nothing shows"
        " until they have learned something.",
        (TP,),
        threads=("huggingface/text-generation-inference/issues/1036", "awslabs/slapo/issues/10"),
    ),
    "6d": Twin(
        "one product leaves out the sum over its tensor-parallel group",
        reduce_dropped,
        "Every rank continues with its own part. Before the product, forward is right and"
        " gradients are wrong. Ranks now also differ where they must be equal.",
        (TP,),
        threads=("NovaSky-AI/SkyRL/pull/1886",),
    ),
    "8b": Twin(
        "the loss is divided by the tokens of a microbatch, not of the step",
        loss_of_a_microbatch,
        "Every gradient is too large by the number of microbatches. AdamW divides by their size"
        " and hides it; plain SGD does not.",
        (PP,),
        threads=("karpathy/nanoGPT/issues/168", "meta-pytorch/torchtune/pull/1875"),
    ),
    "8c": Twin(
        "the sum of one gradient bucket is lost",
        bucket_dropped,
        "A few neighbouring parameters keep this rank's own gradient. All others are right, and"
        " the loss of the step is too.",
        (DP,),
        threads=("pytorch/pytorch/issues/109191",),
    ),
    "8d": Twin(
        "gradients are summed over the replicas twice",
        reduce_doubled,
        "All gradients of a stage are multiplied by the number of replicas, after one sum too"
        " many.",
        (DP,),
        threads=("NVIDIA/Megatron-LM/issues/775",),
    ),
    "8e": Twin(
        "gradients are summed before the last weight gradient is in them",
        summed_early,
        "The last microbatch of each replica is not summed. The loss is right, and every gradient"
        " is a little wrong.",
        (DP,),
        threads=("deepspeedai/DeepSpeed/issues/8061",),
    ),
    "9c": Twin(
        "the two ends of the pipeline do not sum the gradient of the tied table",
        tie_forgotten,
        "Embedding and head share one table. Each end has only its own part of the gradient, and"
        " the two copies drift apart.",
        (PP,),
        threads=("uw-syfi/piper/issues/13",),
    ),
    "9d": Twin(
        "the gradient of the tied table is summed over both ends twice",
        tied_twice,
        "Exactly one tensor has twice its gradient.",
        (PP,),
        threads=("NVIDIA/Megatron-LM/issues/844",),
    ),
    "9e": Twin(
        "the gradient norm counts tensors that several ranks hold once per rank",
        norm_counts_copies,
        "Every gradient is right. Only the norm is too large, and with it clipping is wrong.",
        (PP, TP),
        threads=("NVIDIA-NeMo/RL/pull/3788", "ROCm/TransformerEngine/pull/715"),
    ),
    "10c": Twin(
        "one weight gradient of one microbatch is left out",
        weight_gradient_skipped,
        "One layer lacks one microbatch. Nothing else differs, because no other pass reads a"
        " weight gradient.",
        (PP,),
    ),
}


def by_letter() -> dict[str, str]:
    """Return {letter: exercise}, in the alphabetical order of the causes."""
    order = sorted(TWINS, key=lambda number: TWINS[number].cause)
    return {chr(ord("a") + place): number for place, number in enumerate(order)}
