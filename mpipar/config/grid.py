"""The ranks, and the order of work in the pipeline."""

import math
from dataclasses import dataclass

from mpipar.comm.grid import AXES, PIECES_PER_RANK
from mpipar.config.setting import setting

AUTO = "auto"  # of --schedule and --layout: chosen once costs are known


@dataclass(frozen=True)
class GridConfig:
    """The ranks: dp x pp x cp x tp = number of ranks, and the order of work in the pipeline."""

    dp: int | None = setting(None, "data-parallel copies (default: what the ranks leave)", low=1,
                             high=2**17)
    pp: int | None = setting(None, "pipeline ranks (default 2 if the ranks allow)", low=1,
                             high=2**12)
    cp: int = setting(
        1, "context-parallel ranks: each holds T/cp tokens of a row, and attention crosses ranks",
        low=1, high=2**16)
    cp_attention: str | None = setting(
        None, "with --cp: keys and values go round a ring (default), or are gathered; ulysses:"
        " ranks exchange tokens for heads", choices=tuple(PIECES_PER_RANK))
    tp: int | None = setting(None, "tensor-parallel ranks (default 2 from 4 ranks on)", low=1,
                             high=2**16)
    ep: int = setting(
        1, "expert-parallel ranks: neighbours in dp x cp that share out the experts of a block, and"
        " exchange tokens", low=1, high=2**12)
    expert_dispatch: str = setting(
        "all-to-all", "how tokens reach the ranks of --ep: each row is sent to the experts of its"
        " token; or all-gather: every rank gets all rows", choices=("all-to-all", "all-gather"))
    rank_order: str = setting(
        "pp,dp,cp,tp", "axes from outermost to innermost; neighbours of the last are nearest")
    schedule: str = setting(
        "1f1b", "order of forward and backward in the pipeline, or auto: the shortest simulated "
        "step, from costs measured at the start")
    schedule_csv: str | None = setting(
        None, "run the schedule of this CSV file (torch.distributed.pipelining's format)")
    chunks: int | None = setting(None, "stages per pipeline rank (default: the schedule's)", low=1,
                                 high=2**10)
    group_size: int | None = setting(
        None, "interleaved: microbatches that go round the ranks together (default: pp)", low=1,
        high=2**16)
    stage_layers: tuple[int, ...] | None = setting(
        None, "blocks of each stage, as 3,2,2,1 (default: equal cost, head counted)", low=0)
    num_microbatches: int | None = setting(
        None, "microbatches per step and dp copy; more = smaller pipeline bubble", low=1,
        high=2**16)

    @property
    def num_ranks(self) -> int:
        """Ranks of the axes; one that is still to be chosen counts once."""
        return math.prod(getattr(self, axis) or 1 for axis in AXES)
