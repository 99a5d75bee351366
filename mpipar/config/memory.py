"""What a rank keeps, and what it makes again instead."""

from dataclasses import dataclass

from mpipar.config.setting import setting

OF_ZERO_3 = ("zero", 3)


@dataclass(frozen=True)
class MemoryConfig:
    """What a rank keeps, and what it makes again instead."""

    recompute: str = setting(
        "none", "block: a block keeps only its input, and runs forward again before its input"
        " gradient; attention: only the scores are made again",
        choices=("none", "attention", "block"))
    recompute_layers: int | None = setting(
        None, "with --recompute: only the first so many blocks of each stage (default: all)", low=1,
        high=2**16, only=("recompute", "block", "attention"))
    zero: int = setting(
        0, "ZeRO: what the ranks of dp x cp share out: 1 = master weights and moments; 3 = also"
        " weights, and with --zero-grads sharded gradients", choices=(0, 1, 3))
    zero_grads: str = setting(
        "full", "which gradients a rank keeps until the end of a step; sharded: its own pieces",
        choices=("full", "sharded"), only=OF_ZERO_3)
    zero_keep: str = setting(
        "none", "none: weights are gathered for each pass of a block; stage: once per step, from"
        " the first pass of a stage to the last", choices=("none", "stage"), only=OF_ZERO_3)

    @property
    def keeps_pieces_of_gradients(self) -> bool:
        """Whether a rank keeps only its pieces of gradients, as --zero-grads says with --zero 3."""
        return self.zero == 3 and self.zero_grads == "sharded"

    @property
    def gathers(self) -> str | None:
        """When weights are gathered that no rank holds whole (--zero-keep); None where all do."""
        return self.zero_keep if self.zero == 3 else None
