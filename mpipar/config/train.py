"""Training settings: steps, batch size, optimizer, learning rate; sharding and recomputation."""

from dataclasses import dataclass

from mpipar.config.setting import setting

# {role of a parameter: its update rule}. Classes of rules: `train.build.UPDATES`.
OPTIMIZERS = {
    "adamw": {"numbers": "adamw", "matrices": "adamw", "signs": "signs"},
    "sgd": {"numbers": "sgd", "matrices": "sgd", "signs": "signs"},
    "muon": {"numbers": "adamw", "matrices": "muon", "signs": "signs"},
}
OF_ISLANDS = ("islands",)  # for any number of islands


def with_rule(*rules: str) -> tuple[str, ...]:
    """Return the optimizers that have one of these update rules, as `only=` of a setting."""
    return ("optimizer", *(name for name, one in OPTIMIZERS.items() if {*rules} & {*one.values()}))


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batch size, optimizer and learning rate."""

    steps: int = setting(
        500, "number of optimizer steps; 0 = only evaluate the weights, and sample", low=0
    )
    batch_size: int | None = setting(
        None, "rows per step over all ranks; a multiple of dp * num-microbatches", low=1, high=2**24
    )
    optimizer: str = setting(
        "adamw",
        "update rule; muon: of hidden matrices, and AdamW of the rest",
        choices=tuple(OPTIMIZERS),
    )
    lr: float = setting(3e-3, "peak learning rate", above=0.0)
    warmup_steps: int = setting(60, "steps of linear learning-rate warm-up", low=0)
    lr_schedule: str = setting(
        "cosine",
        "learning rate after the warm-up: cosine or linear = decays until the last step;"
        " wsd = constant, then decays at the end; constant",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    min_lr_ratio: float = setting(
        0.1,
        "final learning rate as a fraction of the peak, if it decays",
        low=0.0,
        only=("lr_schedule", "cosine", "linear", "wsd"),
    )
    weight_decay: float = setting(
        0.1, "decoupled weight decay, multiplied by lr; not of biases and norms", low=0.0
    )
    beta1: float = setting(
        0.9, "AdamW: decay rate of the first moment", low=0.0, below=1.0, only=with_rule("adamw")
    )
    beta2: float = setting(
        0.95, "AdamW: decay rate of the second moment", low=0.0, below=1.0, only=with_rule("adamw")
    )
    eps: float = setting(  # 0 in float32 would turn weights that never had a gradient into NaN
        1e-8,
        "AdamW: added to the square root of the second moment",
        low=2.0**-126,
        only=with_rule("adamw"),
    )
    clip: float = setting(1.0, "largest global gradient norm; 0 = no clipping", low=0.0)
    bucket_bytes: int = setting(
        4 * 2**20,
        "bytes per gradient all-reduce; smaller = earlier start, more messages (default 4M)",
        low=1,
        in_bytes=True,
        only=("zero", 0, 1),
    )  # ZeRO-3 reduces each unit as a whole
    outer_interval: int = setting(
        50,
        "islands: steps from one average of all islands' weights to the next",
        low=1,
        only=OF_ISLANDS,
    )
    outer_lr: float = setting(
        0.7, "islands: learning rate of the outer step", above=0.0, only=OF_ISLANDS
    )
    outer_momentum: float = setting(
        0.9, "islands: Nesterov momentum of the outer step", low=0.0, below=1.0, only=OF_ISLANDS
    )


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
        only=("zero", 3),
    )

    @property
    def keeps_gathered(self) -> bool:
        """Whether sharded weights are gathered once per step and kept."""
        return self.zero == 3 and self.reshard_after_forward == "no"
