"""What a rank keeps, and what it makes again instead."""

from dataclasses import dataclass

from mpipar.config.grid import AUTO
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
        high=2**16)
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


def memory_problems(config) -> list[str]:
    """Flags that need another one, and layers that have nothing to make again."""
    memory, found = config.memory, []
    if memory.recompute_layers is not None and memory.recompute == "none":
        found.append(f"--recompute-layers {memory.recompute_layers}: counts the blocks of"
                     " --recompute, which is none; add --recompute block, or leave it out")
    if memory.recompute == "attention" and not config.model.whole_heads:
        found.append(f"--recompute attention: a {config.model.model} has no attention; use"
                     " --recompute block, or none")
    if memory.recompute_layers is not None and config.grid.schedule == AUTO:
        found.append(f"--recompute-layers {memory.recompute_layers}: makes blocks of a stage"
                     " unequal, and --schedule auto measures one for all; name a schedule")
    return found


def sharing_problems(config) -> list[str]:
    """What keeps ZeRO from sharing out what ranks keep. config: its grid is complete."""
    memory, grid, found = config.memory, config.grid, []
    if memory.zero and grid.dp * grid.cp == 1:
        found.append(f"--zero {memory.zero}: shares out what the ranks of dp x cp keep alike, and"
                     f" dp {grid.dp} x cp {grid.cp} is one rank; use --dp 2 or --cp 2, or --zero 0")
    if memory.zero == 3 and grid.schedule == AUTO:
        found.append("--zero 3: gathers weights in each pass, and --schedule auto measures passes"
                     " without that; name a schedule, or use --zero 1")
    return found
