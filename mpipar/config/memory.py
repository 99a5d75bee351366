"""Memory settings: ZeRO sharding and activation recomputation."""

from dataclasses import dataclass

from mpipar.config.setting import setting

OF_ZERO_3 = ("zero", 3)


@dataclass(frozen=True)
class MemoryConfig:
    """ZeRO sharding and activation recomputation."""

    recompute: str = setting(
        "none",
        "activation recomputation: block = a block keeps only its input and repeats its"
        " forward pass before its backward pass; attention = only attention scores are recomputed",
        choices=("none", "attention", "block"),
    )
    recompute_layers: int | None = setting(
        None,
        "with --recompute: only the first N blocks of each stage (default: all)",
        low=1,
        high=2**16,
        only=("recompute", "block", "attention"),
    )
    zero: int = setting(
        0,
        "ZeRO, what is sharded over dp x cp: 1 = master weights and moments; 3 = weights too,"
        " and gradients with --zero-grads sharded",
        choices=(0, 1, 3),
    )
    zero_grads: str = setting(
        "full",
        "gradients that a rank keeps until the end of a step; sharded = only its own shard",
        choices=("full", "sharded"),
        only=OF_ZERO_3,
    )
    zero_keep: str = setting(
        "none",
        "none = weights are gathered for each pass of a block; stage = once per step, kept"
        " from the first pass of a stage to the last",
        choices=("none", "stage"),
        only=OF_ZERO_3,
    )

    @property
    def keeps_pieces_of_gradients(self) -> bool:
        """Whether a rank keeps only its gradient shard, as --zero-grads says with --zero 3."""
        return self.zero == 3 and self.zero_grads == "sharded"

    @property
    def gathers(self) -> str | None:
        """When sharded weights are gathered (--zero-keep); None if every rank holds them whole."""
        return self.zero_keep if self.zero == 3 else None
