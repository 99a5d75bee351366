"""What is planned: a decoder's sizes, a layout, and the software whose efficiency is assumed.

Letters: D width of the stream, F of the feed-forward network, V vocabulary, T tokens of a sequence.
There are a heads of queries and k of keys and values, each of width h.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.pipeline.schedules.catalog import FAMILIES, Family
from mpipar.study.plan.machine import Machine


class Shape(ModelConfig):
    """The sizes of a decoder, complete, and what they amount to."""

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        """Return the Shape of a ModelConfig."""
        return cls(
            **{one.name: getattr(model.completed(), one.name) for one in fields(ModelConfig)}
        )

    @property
    def position_rows(self) -> int:
        """Rows of a learned table of positions."""
        return self.seq_len if self.positions == "learned" else 0

    @property
    def gates(self) -> int:
        """Matrices that widen: two where the activation has a gate."""
        return 2 if self.activation == "swiglu" else 1

    @property
    def expert_share(self) -> float:
        """The share of the blocks that have experts."""
        return self.layers // self.expert_interval / self.layers if self.experts else 0.0

    def ffn_parameters(self, width: float) -> float:
        """Return the weights of a feed-forward network of this width."""
        return (self.gates + 1) * self.d_model * width

    @cached_property
    def expert_parameters(self) -> float:
        """Weights of the experts of a block, averaged over all blocks."""
        each = self.ffn_parameters(self.expert_ffn or 0)
        return self.expert_share * (self.experts or 0) * each

    @cached_property
    def dense_parameters(self) -> float:
        """Weights of a block without its experts, averaged; biases and norms are a thousandth."""
        attention = 2 * self.d_model * (self.heads + self.kv_heads) * self.head_dim
        beside = self.ffn_parameters(self.shared_expert_ffn or 0) + self.d_model * (
            self.experts or 0
        )
        dense = (1 - self.expert_share) * self.ffn_parameters(self.ffn)
        return attention + dense + self.expert_share * beside

    @cached_property
    def block_parameters(self) -> float:
        """Weights of a block, averaged over all blocks."""
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def passed_parameters(self) -> float:
        """Weights of a block that a token passes, of its own experts only."""
        passed = self.experts_per_token / (self.experts or 1)
        return self.dense_parameters + self.expert_parameters * passed

    @property
    def table_parameters(self) -> int:
        """Weights of the token table, and of the head if it has its own."""
        tables = self.vocab_size * (1 if self.tied else 2) + self.position_rows
        return tables * self.d_model

    @property
    def parameters(self) -> float:
        """Weights of the whole model."""
        return self.layers * self.block_parameters + self.table_parameters

    def step_flops(self, rows: int) -> float:
        """Return the FLOPs of a step over `rows` sequences, without what runs again.

        A matmul of a token with n weights takes 2n FLOPs forward and 4n backward. Scores and values
        of a token take 4Tah forward over the whole square. Source: arXiv 2104.04473 appendix,
        extended to grouped heads and gates.
        """
        forward = 2 * self.passed_parameters + 4 * self.seq_len * self.heads * self.head_dim
        return (
            3 * rows * self.seq_len * (self.layers * forward + 2 * self.vocab_size * self.d_model)
        )


def utilization(flops: float, seconds: float, devices: int, peak_tflops: float) -> float:
    """Return the share of the devices' peak that a step's FLOPs amount to (MFU)."""
    return flops / (seconds * devices * peak_tflops * 1e12)


class Layout(NamedTuple):
    """How a job is cut. rows: sequences of a microbatch. chunks: stages of each pipeline rank.

    recompute: none, attention or block. zero: 0, 1 or 3. outer: the outermost axis, pp or
    dp; the other one stays inside nodes if it can. ep: ranks of dp x cp among which experts are
    distributed.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    rows: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    zero: int = 0
    outer: str = "pp"
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """dp, pp, cp, tp and ep."""
        return self.dp, self.pp, self.cp, self.tp, self.ep

    @property
    def of_passes(self) -> Layout:
        """The layout without what the passes of a block do not depend on, apart from gathers."""
        whole = self._replace(dp=1, num_microbatches=1, zero=3 * (self.zero == 3))
        return whole if self.ep > 1 else whole._replace(pp=1, outer="pp")

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights, apart from experts, and read different tokens."""
        return self.dp * self.cp

    @property
    def stage_stride(self) -> int:
        """How many ranks apart neighbours of the pipeline are."""
        return self.tp * (self.cp if self.outer == "dp" else self.data_ranks)

    @property
    def data_stride(self) -> int:
        """How many ranks apart those that sum their gradients are."""
        return self.tp * (self.pp if self.outer == "dp" else 1)

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def family(self) -> Family:
        """The schedule's family, which knows how it is made."""
        return FAMILIES[self.schedule]

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage: the first one if stages go back up."""
        return 0 if self.family.placement == "v" else self.pp - 1

    def blocks_of(self, layers: int) -> tuple[int, ...]:
        """Return the blocks of each stage; the remainder goes to the middle, away from the ends."""
        share, left = divmod(layers, self.stages)
        first = (self.stages - left) // 2
        return (share,) * first + (share + 1,) * left + (share,) * (self.stages - first - left)

    def blocks_by_rank(self, layers: int) -> tuple[int, ...]:
        """Return the blocks of each pipeline rank, of all its stages."""
        counts = self.blocks_of(layers)
        if self.family.placement == "v":
            return tuple(counts[rank] + counts[-1 - rank] for rank in range(self.pp))
        return tuple(sum(counts[rank :: self.pp]) for rank in range(self.pp))


def config_of(named: Config, shape: Shape, layout: Layout, dtype: str, device: str) -> Config:
    """Return the Config of a layout, before it is resolved. named: it names the model."""
    grid = replace(
        named.grid,
        **{axis: getattr(layout, axis) for axis in (*AXES, "ep", "num_microbatches", "schedule")},
        chunks=layout.chunks if layout.family.looped else None,
        stage_layers=layout.blocks_of(shape.layers) if layout.pp > 1 else None,
        rank_order="dp,pp,cp,tp" if layout.outer == "dp" else "pp,dp,cp,tp",
    )
    return replace(
        named,
        grid=grid,
        model=replace(
            named.model, seq_len=shape.seq_len, sequence_parallel=layout.sequence_parallel
        ),
        train=replace(named.train, batch_size=layout.dp * layout.rows * layout.num_microbatches),
        memory=replace(named.memory, recompute=layout.recompute, zero=layout.zero),
        run=replace(named.run, dtype=dtype, device=device),
    )


class Segment(NamedTuple):
    """Parameters of a rank with identical copies on `ranks` ranks, `stride` ranks apart."""

    elements: float
    ranks: int
    stride: int


def segments(shape: Shape, layout: Layout, blocks: float, tables: float = 0.0) -> list[Segment]:
    """Return the segments of some blocks and tables on a rank, one per gradient group as in mpipar.

    Experts are distributed, so fewer ranks hold the same ones.
    """
    tp, ep, ranks, stride = layout.tp, layout.ep, layout.data_ranks, layout.data_stride
    found = [Segment((blocks * shape.dense_parameters + tables) / tp, ranks, stride)]
    if shape.experts:
        experts = blocks * shape.expert_parameters / tp / ep
        found.append(Segment(experts, ranks // ep, stride * ep))
    return found


class Constants(NamedTuple):
    """What a software stack achieves on a generation of machines: four constants, fitted to steps.

    products: share of the machine's rate of matmuls. elementwise: how often activations cross
    memory, over once for each operation. attention: share of the machine's rate of attention.
    starts_us: what the processor takes to launch the operations of a block's forward.
    """

    products: float
    elementwise: float
    attention: float
    starts_us: float


@dataclass(frozen=True)
class Stack:
    """A software stack.

    sets: (generation, constants) of machines. axes, zeros: along which it cuts a job, and the
    stages of ZeRO that it has. fused: attention without scores in memory. *_bytes: of a
    parameter. overlap: whether gathers and sums overlap with matmuls. every_other: selective
    recompute repeats every other matmul, and what lies
    between them. own: whether it is mpipar, whose memory a step on shapes tells. norm_bytes: of a
    number that a norm keeps, 0 if as wide as the others. logit_bytes: per logit, besides the number
    itself. number_bytes: of a number that is computed with. pads: whether the vocabulary is padded
    to a size that suits tensor cores. evidence: the measured steps it is based on.
    """

    sets: tuple[tuple[str, Constants], ...]
    evidence: str
    axes: tuple[str, ...] = ("dp", "pp", "cp", "tp", "ep")
    zeros: tuple[int, ...] = (0, 1, 3)
    fused: bool = True
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    overlap: bool = True
    every_other: bool = False
    own: bool = False
    norm_bytes: float = 0
    logit_bytes: float = 12
    number_bytes: float = 2
    pads: bool = True

    @property
    def sum_bytes(self) -> float:
        """Return the bytes of a gradient that ranks add up: mpipar sums what it accumulates in."""
        return self.gradient_bytes if self.own else self.number_bytes

    def on(self, machine: Machine) -> Constants:
        """Return the constants on a machine, those of the first generation if it has none."""
        return dict(self.sets).get(machine.efficiency, self.sets[0][1])

    def with_dtype(self, dtype: str) -> Stack:
        """Return the same stack in another number format; 32-bit weights need no masters."""
        wide = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8, "number_bytes": 4}
        return replace(self, **wide) if dtype == "float32" else self


MEGATRON = (
    ("a100", Constants(0.946, 1.71, 1.04, 808.0)),
    ("h100", Constants(1.04, 1.03, 0.958, 300.0)),
)
FSDP = (
    ("a100", Constants(0.882, 2.22, 0.527, 300.0)),
    ("h100", Constants(0.842, 2.96, 0.495, 300.0)),
)
SPREAD = 3.0  # percent by which half of the published steps of a stack differ from the model
STACKS = {
    "mpipar": Stack(
        MEGATRON,
        "none of mpipar's own steps is measured on a GPU; its constants and this figure are"
        " Megatron-LM's",
        own=True,
        logit_bytes=0,
    ),
    "megatron": Stack(
        MEGATRON, "170 published steps of Megatron-LM and its relatives, and 730 on one node"
    ),
    "fsdp": Stack(
        FSDP,
        "108 published steps of PyTorch FSDP",
        axes=("dp",),
        zeros=(0, 3),
        weight_bytes=4,
        optimizer_bytes=8,
        every_other=True,
        logit_bytes=4,
    ),
}
