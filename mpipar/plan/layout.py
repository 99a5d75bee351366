"""A layout as the planner weighs it, and how a model's blocks lie on its stages."""

from __future__ import annotations

from typing import NamedTuple

LINEAR = ("naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs",
          "interleaved-zb")  # stage s lies on rank s mod pp
FOLDED = ("zb-v",)  # the last stage lies on the first rank


class Layout(NamedTuple):
    """How a job is cut. rows: of a microbatch. chunks: stages of each pipeline rank.

    recompute: none, attention or block. zero: 0, 1 or 3; 2 stands for weights that are gathered
    once and stay for the step. outer: the axis whose groups cross nodes first (rank order).
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

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """dp, pp, cp and tp."""
        return self[:4]

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same weights and read different tokens."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank; zb-v goes down the ranks and back up."""
        if self.schedule in FOLDED:
            return rank, self.stages - 1 - rank
        return tuple(range(rank, self.stages, self.pp))

    @property
    def last_rank(self) -> int:
        """The pipeline rank that holds the last stage."""
        return 0 if self.schedule in FOLDED else self.pp - 1

    def blocks_of(self, rank: int, counts: tuple[int, ...]) -> int:
        """Blocks of a pipeline rank. counts: those of each stage."""
        return sum(counts[stage] for stage in self.held(rank))


def blocks_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage; what is left over goes to the middle, away from embedding and head."""
    share, left = divmod(layers, stages)
    first = (stages - left) // 2
    return tuple(share + (first <= stage < first + left) for stage in range(stages))
