"""The shape of the model that is trained: one class for each family.

A family has the fields that mean something to it, and no others. Its members are values of its
choices, such as `norm`. A field that only one value of a choice uses names that value: see
`setting`.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from mpipar.config.setting import setting

_LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": "none", "tied": False}

# Architecture -> the values that its decoders have, as far as the user names none.
ARCHS = {
    "gpt2": {},  # the defaults of the fields
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA | {"rope_theta": 1e6, "experts": 8},
    "qwen2": _LLAMA | {"norm_eps": 1e-6, "bias": "qkv", "rope_theta": 1e6},
}
OF_ROPE = ("positions", "rope")
ROUTINGS = ("learned", "uniform", "hot", "one-hot", "zipf", "adversarial")  # of --routing
OF_EXPERTS = ("experts",)  # whatever their number
SCALING = "8,1,4,8192"  # of rotations, in Llama 3.1
CUTS = {"ffn_cut", "sequence_parallel", "tp_matmul"}  # how a layer is cut: not the model's shape


def family(name: str):
    """Return the field `model`, with the family's name as its default."""
    return setting(name, "what is trained: a decoder of text, or a convnet for images",
                   choices=("decoder", "convnet"))


@dataclass(frozen=True)
class ModelConfig:
    """For every family: features flow as a stream through blocks, each of which is wider inside."""

    model: str
    layers: int = setting(4, "blocks: of a transformer, or pairs of convolutions", low=1, high=1024)
    ffn: int | None = setting(
        None, "width F inside a block (default 4 times that of the stream; swiglu: 8/3 times,"
        " rounded up to 32); padded for tp", low=1, high=2**20)
    norm: str = setting("layer", "layer = LayerNorm; rms = RMSNorm, which has no mean and no bias",
                        choices=("layer", "rms"))
    ffn_cut: str = setting(
        "pair", "FFN over tp: pair = column + row, one all-reduce; gather = both by output, an "
        "all-gather after each; reduce = both by input, an all-reduce after each",
        choices=("pair", "gather", "reduce"))

    @property
    def whole_heads(self) -> int:
        """Attention heads, which tp must divide; 0 where there are none."""
        return 0

    @property
    def whole_kv_heads(self) -> int:
        """Heads of keys and values: tp divides them, or they divide tp; 0 where there are none."""
        return 0

    @property
    def targets_per_row(self) -> int:
        """Classes that are predicted for a row of data, such as that of an image."""
        return 1

    def completed(self) -> Self:
        """Return the same with every None replaced by what it stands for."""
        return replace(self, ffn=self.ffn or 4 * self.width)


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """A transformer that predicts the next token, pre-norm: GPT-2, Llama and their kin."""

    model: str = family("decoder")
    arch: str = setting(
        "gpt2", "brings its own norm, activation, positions, bias and tied, unless they are given,"
        " and the form of its weights", choices=tuple(ARCHS))
    d_model: int = setting(128, "model width D, in features", low=1, high=2**17)
    heads: int = setting(4, "attention heads H of queries; tp divides H", low=1, high=2**12)
    kv_heads: int | None = setting(
        None, "heads of keys and values, each for H/N heads of queries (default: H)", low=1,
        high=2**12)
    head_dim: int | None = setting(None, "width of a head (default D/H)", low=1, high=2**12)
    seq_len: int = setting(64, "tokens per row T; attention memory grows with T^2", low=1,
                           high=2**24)
    vocab_size: int = setting(256, "tokens in the vocabulary V (256 = bytes); padded for tp", low=2,
                              high=2**22)
    norm_eps: float = setting(
        1e-5, "added to the variance in norms", low=2.0**-126, below=1.0)
    activation: str = setting(
        "gelu", "inside a block: gelu(x up) down; or swiglu: (silu(x gate) x up) down",
        choices=("gelu", "swiglu"))
    positions: str = setting(
        "learned", "a learned vector is added to each token; or rope, rotary positions: queries and"
        " keys are rotated",
        choices=("learned", "rope"))
    rope_theta: float = setting(
        10000.0, "base of the rotations: number i of a head turns by X^(-2i/d) per position",
        above=0.0, below=1e12, only=OF_ROPE)
    rope_scaling: tuple[float, ...] = setting(
        (), "slows rotations down as Llama 3 does: factor, low and high frequency factor, original"
        " length (default: none)", above=0.0, below=2.0**40, only=OF_ROPE)
    max_positions: int | None = setting(
        None, "longest row that the rotary positions are for, at least T; config.json says it to"
        " other programs (default: T, or what --rope-scaling reaches)", low=1, high=2**24,
        only=OF_ROPE)
    bias: str = setting("all", "which products of a block add a bias; qkv: of queries, keys and"
                        " values", choices=("all", "qkv", "none"))
    tied: bool = setting(True, "the head uses the token embedding's weights (one matrix less)")
    experts: int | None = setting(
        None, "experts of a block: feed-forward networks of which a router gives each token some"
        " (default: one network for all tokens)", low=2, high=2**12)
    experts_per_token: int = setting(
        2, "experts that each token passes", low=1, high=2**12, only=OF_EXPERTS)
    expert_ffn: int | None = setting(
        None, "width inside an expert, padded for tp (default: --ffn)", low=1, high=2**20,
        only=OF_EXPERTS)
    expert_interval: int = setting(
        1, "every N-th block has experts, and the others one network", low=1, high=1024,
        only=OF_EXPERTS)
    shared_expert_ffn: int | None = setting(
        None, "width of one more network that all tokens pass beside their experts (default: none)",
        low=1, high=2**20, only=OF_EXPERTS)
    router_balance: str = setting(
        "loss", "what makes experts get equally many tokens: loss = one more loss of each row; bias"
        " = a number of each expert, changed once a step, that the choice adds; none",
        choices=("none", "loss", "bias"), only=OF_EXPERTS)
    router_loss_coef: float = setting(
        0.01, "factor of the loss that balances experts", low=0.0, only=("router_balance", "loss"))
    router_bias_rate: float = setting(
        0.001, "what a step adds to or takes from the number of each expert", low=0.0,
        only=("router_balance", "bias"))
    routing: str = setting(
        "learned", "for study: which experts tokens pass, whatever the router says; one-hot = the"
        " first one, and others; zipf = the n-th has 1/n of the first; adversarial = all of a rank"
        " are on the next rank", choices=ROUTINGS, only=OF_EXPERTS, rare=True)
    sequence_parallel: bool = setting(
        False, "cut tokens over tp between the products: norms, stash and pipeline messages shrink "
        "to 1/tp, but there are more barriers")
    tp_matmul: str = setting(
        "plain", "ring: with --sequence-parallel, tokens travel in pieces while others are "
        "multiplied", choices=("plain", "ring"))

    @property
    def width(self) -> int:
        """Features of the stream between blocks."""
        return self.d_model

    @property
    def whole_heads(self) -> int:
        return self.heads

    @property
    def whole_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def rows(self) -> str:
        """Which side of a product comes first in its weights, in files and so in memory."""
        return "in" if self.arch == "gpt2" else "out"

    @property
    def targets_per_row(self) -> int:
        """The next token at each of T places."""
        return self.seq_len

    def block_kind(self, index: int) -> str:
        """Return the row of the model's BLOCKS for the block of this index."""
        has_experts = self.experts and (index + 1) % self.expert_interval == 0
        return "experts" if has_experts else "dense"

    def completed(self) -> Self:
        """Return the same with every None replaced by what it stands for."""
        ffn = -(-8 * self.width // 96) * 32 if self.activation == "swiglu" else 4 * self.width
        positions = self.max_positions
        if self.positions == "rope" and positions is None:
            scaling = self.rope_scaling or (0.0,)
            positions = max(self.seq_len, round(scaling[0] * scaling[-1]))
        ffn = self.ffn or ffn
        return replace(self, ffn=ffn, kv_heads=self.whole_kv_heads,
                       expert_ffn=self.expert_ffn or (ffn if self.experts else None),
                       head_dim=self.head_dim or self.d_model // self.heads,
                       max_positions=positions)


@dataclass(frozen=True)
class ConvnetConfig(ModelConfig):
    """A network of convolutions that names the class of an image."""

    model: str = family("convnet")
    channels: int = setting(32, "channels D of the stream between convolutions", low=1, high=2**16)
    classes: int = setting(10, "classes V of images; padded for tp", low=2, high=2**22)
    image_shape: tuple[int, ...] = setting(
        (8, 8, 1), "height, width and channels of an image (default 8,8,1)", low=1, high=2**14)
    stem_stride: int = setting(
        1, "step of the first convolution; 2 = a quarter of the work", low=1, high=2**14)

    @property
    def width(self) -> int:
        """Channels of the stream between blocks."""
        return self.channels

    def block_kind(self, index: int) -> str:
        """Return the row of the model's BLOCKS for the block of this index: one for all."""
        return "pair"


FAMILIES = {"decoder": DecoderConfig, "convnet": ConvnetConfig}


def model_config(values: dict) -> ModelConfig:
    """Return the ModelConfig of the family that values["model"] names.

    Values without a field in it are dropped. A decoder gets those of its architecture that are not
    given. A misspelt name gives a decoder; the checks of values report the name.
    """
    chosen = FAMILIES.get(values.get("model"), DecoderConfig)
    if chosen is DecoderConfig:
        values = ARCHS.get(values.get("arch"), {}) | values
    return chosen(**{one.name: values[one.name] for one in fields(chosen) if one.name in values})
