"""A layout as the planner weighs it, and how a model's blocks are placed on its stages."""

from __future__ import annotations

from typing import NamedTuple

from mpipar.pipeline.schedules.families import FAMILIES, Family
from mpipar.plan.shape import Shape

# The schedules, and those of published runs for which one of them stands.
BY_NAME = FAMILIES | {
    name: family._replace(bubble=bubble)
    for family in FAMILIES.values()
    for name, bubble in family.published.items()
}


class Layout(NamedTuple):
    """How a job is cut. rows: of a microbatch. chunks: stages of each pipeline rank.

    recompute: none, attention or block. zero: 0, 1 or 3; 2 stands for weights that are gathered
    once and stay for the step. outer: the axis of the first place of --rank-order, pp or dp; the
    other one stays inside nodes if it can. ep: ranks of dp x cp among which experts are
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
    def rank_order(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return (self.outer, "dp" if self.outer == "pp" else "pp", "cp", "tp")

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def family(self) -> Family:
        """The schedule's family, which knows how it is made."""
        return BY_NAME[self.schedule]

    @property
    def folded(self) -> bool:
        """Whether stages go down the ranks and back up, so that the first rank holds the last."""
        return self.family.placement == "v"

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank."""
        if self.folded:
            return rank, self.stages - 1 - rank
        return tuple(range(rank, self.stages, self.pp))

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        if self.folded:
            return min(stage, self.stages - 1 - stage)
        return stage % self.pp

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return 0 if self.folded else self.pp - 1

    def tables_of(self, rank: int) -> int:
        """Return how many of the embedding and the head a pipeline rank has."""
        return (rank == 0) + (rank == self.last_rank)

    def blocks_of(self, rank: int, counts: tuple[int, ...]) -> int:
        """Return the blocks of a pipeline rank. counts: those of each stage."""
        if self.folded:
            return counts[rank] + counts[-1 - rank]
        return sum(counts[rank :: self.pp])


class Segment(NamedTuple):
    """Parameters of a rank with identical copies on `ranks` ranks, `stride` ranks apart."""

    elements: float
    ranks: int
    stride: int


def segments(shape: Shape, layout: Layout, blocks: float, tables: float = 0.0) -> list[Segment]:
    """Return the segments of some blocks and tables on a rank, one per gradient group as in mpipar.

    Experts are distributed, so fewer ranks hold the same ones.
    """
    found = [
        Segment(
            (blocks * shape.dense_parameters + tables) / layout.tp,
            layout.data_ranks,
            layout.data_stride,
        )
    ]
    if shape.experts:
        found.append(
            Segment(
                blocks * shape.expert_parameters / layout.tp / layout.ep,
                layout.data_ranks // layout.ep,
                layout.data_stride * layout.ep,
            )
        )
    return found


def rank_segments(
    shape: Shape, layout: Layout, rank: int, counts: tuple[int, ...]
) -> list[Segment]:
    """Return the segments of a pipeline rank. counts: blocks of each stage.

    The first and the last stage have a table each. A rank with both has one where they are tied.
    """
    copies = min(layout.tables_of(rank), 1 if shape.tied else 2)
    tables = shape.width * (copies * shape.vocab + (rank == 0) * shape.positions)
    return segments(shape, layout, layout.blocks_of(rank, counts), tables)


def blocks_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage; the remainder goes to the middle, away from the ends."""
    share, left = divmod(layers, stages)
    first = (stages - left) // 2
    return tuple(share + (first <= stage < first + left) for stage in range(stages))
