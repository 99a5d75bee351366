"""The shape of the trained model: a decoder.

Its variants are values of its choices, such as `norm`. A field that applies to one value of a
choice names that value: see `setting`.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from mpipar.config.setting import setting

_LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": "none", "tied": False}

# Architecture -> the values of its decoders, unless the user gives others.
ARCHS = {
    "gpt2": {},  # the defaults of the fields
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA | {"rope_theta": 1e6, "experts": 8},
    "qwen2": _LLAMA | {"norm_eps": 1e-6, "bias": "qkv", "rope_theta": 1e6},
}
OF_ROPE = ("positions", "rope")
OF_EXPERTS = ("experts",)  # for any number of experts
# How layers are cut, which is not the model's shape.
CUT_SETTINGS = {"ffn_cut", "sequence_parallel", "tp_matmul"}


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm transformer that predicts the next token: GPT-2, Llama and their relatives."""

    arch: str = setting(
        "gpt2",
        "sets norm, activation, positions, bias and tied, unless they are given, and the"
        " format of the weights",
        choices=tuple(ARCHS),
    )
    layers: int = setting(4, "blocks of the transformer", low=1, high=1024)
    ffn: int | None = setting(
        None,
        "width F inside a block (default: 4 times the width of the stream; swiglu: 8/3 times,"
        " rounded up to a multiple of 32); padded for tp",
        low=1,
        high=2**20,
    )
    norm: str = setting(
        "layer", "layer = LayerNorm; rms = RMSNorm, without mean and bias", choices=("layer", "rms")
    )
    ffn_cut: str = setting(
        "pair",
        "how tp cuts the FFN: pair = column, then row: one all-reduce; gather = both by "
        "output: an all-gather after each; reduce = both by input: an all-reduce after each",
        choices=("pair", "gather", "reduce"),
    )
    d_model: int = setting(128, "model width D, in features", low=1, high=2**17)
    heads: int = setting(4, "attention heads H of queries; tp divides H", low=1, high=2**12)
    kv_heads: int | None = setting(
        None, "key/value heads, each shared by H/N query heads (default: H)", low=1, high=2**12
    )
    head_dim: int | None = setting(
        None, "width of a head (default D/H)", low=1, high=2**12, of_weights=True
    )
    seq_len: int = setting(
        64, "tokens per row T; attention memory grows with T^2", low=1, high=2**24
    )
    vocab_size: int = setting(
        256, "tokens in the vocabulary V (256 = bytes); padded for tp", low=2, high=2**22
    )
    norm_eps: float = setting(
        1e-5, "epsilon added to the variance in norms", low=2.0**-126, below=1.0
    )
    activation: str = setting(
        "gelu",
        "inside a block: gelu = gelu(x up) down; swiglu = (silu(x gate) x up) down",
        choices=("gelu", "swiglu"),
    )
    positions: str = setting(
        "learned",
        "learned = a learned vector is added to each token; rope = rotary positions:"
        " queries and keys are rotated",
        choices=("learned", "rope"),
    )
    rope_theta: float = setting(
        10000.0,
        "base of the rotations: pair i of a head turns by X^(-2i/d) per position",
        above=0.0,
        below=1e12,
        only=OF_ROPE,
    )
    rope_scaling: tuple[float, ...] = setting(
        (),
        "slows rotations down as Llama 3 does: factor, low and high frequency factor, original"
        " length (default: none)",
        above=0.0,
        below=2.0**40,
        only=OF_ROPE,
        of_weights=True,
    )
    max_positions: int | None = setting(
        None,
        "longest row that the positions are made for, at least T: rows of the table of learned"
        " positions; of rotary ones it is only written to config.json for other programs"
        " (default: T, or what rope-scaling reaches)",
        low=1,
        high=2**24,
        of_weights=True,
    )
    bias: str = setting(
        "all",
        "which products of a block add a bias; qkv = those of queries, keys and values",
        choices=("all", "qkv", "none"),
    )
    tied: bool = setting(True, "the head reuses the token embedding's weights (one matrix less)")
    experts: int | None = setting(
        None,
        "experts per block: feed-forward networks, of which a router selects some for each"
        " token (default: one network for all tokens)",
        low=2,
        high=2**12,
    )
    experts_per_token: int = setting(
        2, "experts that each token is routed to", low=1, high=2**12, only=OF_EXPERTS
    )
    expert_ffn: int | None = setting(
        None,
        "width inside an expert, padded for tp (default: --ffn)",
        low=1,
        high=2**20,
        only=OF_EXPERTS,
    )
    expert_interval: int = setting(
        1,
        "every N-th block has experts; the others have one network",
        low=1,
        high=1024,
        only=OF_EXPERTS,
        of_weights=True,
    )
    shared_expert_ffn: int | None = setting(
        None,
        "width of a shared expert, which all tokens pass in addition (default: none)",
        low=1,
        high=2**20,
        only=OF_EXPERTS,
    )
    router_balance: str = setting(
        "loss",
        "how the load of experts is balanced: loss = an auxiliary loss per row; bias = a"
        " bias per expert, adjusted once per step, that only affects the selection; none",
        choices=("none", "loss", "bias"),
        only=OF_EXPERTS,
    )
    router_loss_coef: float = setting(
        0.01,
        "factor of the load-balancing loss",
        low=0.0,
        only=("router_balance", "loss"),
        of_weights=True,
    )
    sequence_parallel: bool = setting(
        False,
        "cut tokens over tp between the products: norms, stash and pipeline messages shrink "
        "to 1/tp, at the price of more barriers",
    )
    tp_matmul: str = setting(
        "plain",
        "ring = with --sequence-parallel, tokens travel in pieces while others are multiplied",
        choices=("plain", "ring"),
    )

    @property
    def rows(self) -> str:
        """Which side of a product comes first in its weights, in files and thus in memory."""
        return "in" if self.arch == "gpt2" else "out"

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that the positions are made for; learned ones are a table."""
        return self.max_positions or self.seq_len

    def block_kind(self, index: int) -> str:
        """Return the key of this block in the model's BLOCKS."""
        has_experts = self.experts and (index + 1) % self.expert_interval == 0
        return "experts" if has_experts else "dense"

    def completed(self) -> Self:
        """Return a copy with every None replaced by the value it stands for."""
        width, positions = self.d_model, self.max_positions
        if self.positions == "rope" and positions is None:
            scaling = self.rope_scaling or (0.0,)
            positions = max(self.seq_len, round(scaling[0] * scaling[-1]))
        ffn = self.ffn or (-(-8 * width // 96) * 32 if self.activation == "swiglu" else 4 * width)
        return replace(
            self,
            ffn=ffn,
            kv_heads=self.kv_heads or self.heads,
            expert_ffn=self.expert_ffn or (ffn if self.experts else None),
            head_dim=self.head_dim or self.d_model // self.heads,
            max_positions=positions,
        )


def model_config(values: dict) -> ModelConfig:
    """Return a ModelConfig of these values, those not given from its architecture.

    Values that are not fields of it are dropped.
    """
    values = ARCHS.get(values.get("arch"), {}) | values
    return ModelConfig(
        **{one.name: values[one.name] for one in fields(ModelConfig) if one.name in values}
    )
