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
    zero: int = setting(
        0,
        "ZeRO, what is sharded over dp x cp: 1 = master weights and moments; 3 = weights and"
        " gradients too",
        choices=(0, 1, 3),
    )
    reshard_after_forward: str = setting(
        "yes",
        "yes = weights are gathered for each pass of a block; no = once per step, kept from the"
        " first pass of a stage to the last",
        choices=("yes", "no"),
        only=OF_ZERO_3,
    )

    @property
    def keeps_gathered(self) -> bool:
        """Whether sharded weights are gathered once per step and kept."""
        return self.zero == 3 and self.reshard_after_forward == "no"
