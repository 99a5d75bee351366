"""The shape of the model that is trained: one class for each family.

A family has the fields that mean something to it, and no others. Its members are values of its
choices, such as `norm`. A field that only one value of a choice uses names that value: see
`setting`.
"""

from dataclasses import dataclass, fields

from mpipar.config.layout import divisors, listing
from mpipar.config.setting import setting


def family(name: str):
    """The field `model`, with the family's name as its default."""
    return setting(name, "what is trained: a decoder of text, or a convnet for images",
                   choices=("decoder", "convnet"))


@dataclass(frozen=True)
class ModelConfig:
    """For every family: features flow as a stream through blocks, each of which is wider inside."""

    model: str
    layers: int = setting(4, "blocks: of a transformer, or pairs of convolutions", low=1, high=1024)
    ffn: int | None = setting(
        None, "width F inside a block (default 4 times that of the stream); padded for tp", low=1,
        high=2**20)
    norm: str = setting("layer", "layer = LayerNorm; rms = RMSNorm, which has no mean and no bias",
                        choices=("layer", "rms"))
    ffn_cut: str = setting(
        "pair", "FFN over tp: pair = column + row, one all-reduce; gather = both by output, an "
        "all-gather after each; reduce = both by input, an all-reduce after each",
        choices=("pair", "gather", "reduce"))


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """A transformer that predicts the next token: GPT-2 family, pre-norm, learned positions."""

    model: str = family("decoder")
    d_model: int = setting(128, "model width D, in features", low=1, high=2**17)
    heads: int = setting(4, "attention heads H; head width = D/H; tp divides H", low=1, high=2**12)
    seq_len: int = setting(64, "tokens per row T; attention memory grows with T^2", low=1,
                           high=2**24)
    vocab_size: int = setting(256, "tokens in the vocabulary V (256 = bytes); padded for tp", low=2,
                              high=2**22)
    tied: bool = setting(True, "the head uses the token embedding's weights (one matrix less)")
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
        """Attention heads, which tp must divide."""
        return self.heads

    @property
    def targets_per_row(self) -> int:
        """Classes that are predicted for a row of data: the next token at each of T places."""
        return self.seq_len

    def shape_problems(self, bad: set[str]) -> list[str]:
        """What is wrong between fields; a relation with one in `bad` is not judged."""
        found = []
        if not bad & {"d_model", "heads"} and self.d_model % self.heads:
            found.append(f"--heads {self.heads}: must divide --d-model {self.d_model}; "
                         f"use {listing(divisors(self.d_model), self.heads)}")
        if self.tp_matmul == "ring" and not self.sequence_parallel:
            found.append("--tp-matmul ring: cuts the barriers of --sequence-parallel in pieces; add"
                         " --sequence-parallel, or leave it out")
        if self.ffn_cut != "pair" and self.sequence_parallel and "ffn_cut" not in bad:
            found.append(f"--ffn-cut {self.ffn_cut}: keeps all tokens on every rank, which "
                         "--sequence-parallel does not; give one of them")
        return found


@dataclass(frozen=True)
class ConvnetConfig(ModelConfig):
    """A network of convolutions that names the class of an image."""

    model: str = family("convnet")
    channels: int = setting(32, "channels D of the stream between convolutions", low=1, high=2**16)
    classes: int = setting(10, "classes V of images; padded for tp", low=2, high=2**22)
    image_shape: tuple[int, ...] = setting(
        (8, 8, 1), "height, width and channels of an image", low=1, high=2**14)
    stem_stride: int = setting(
        1, "step of the first convolution; 2 = a quarter of the work", low=1, high=2**14)

    @property
    def width(self) -> int:
        """Channels of the stream between blocks."""
        return self.channels

    @property
    def whole_heads(self) -> int:
        """There are no attention heads: tp may be anything."""
        return 0

    @property
    def targets_per_row(self) -> int:
        """Classes that are predicted for a row of data: that of the image."""
        return 1

    def shape_problems(self, bad: set[str]) -> list[str]:
        """What is wrong with the images; the pooling behind the stem needs 2 x 2 places."""
        if bad & {"image_shape", "stem_stride"}:
            return []
        shape = ",".join(map(str, self.image_shape))
        if len(self.image_shape) != 3:
            return [f"--image-shape {shape}: must be height,width,channels, as in 8,8,1"]
        least = self.stem_stride + 1
        if min(self.image_shape[:2]) < least:
            return [(f"--image-shape {shape}: with --stem-stride {self.stem_stride} height and"
                     f" width must be at least {least}, for the pooling after it")]
        return []


FAMILIES = {"decoder": DecoderConfig, "convnet": ConvnetConfig}


def model_config(values: dict) -> ModelConfig:
    """The ModelConfig of the family that values["model"] names.

    Values without a field in it are dropped. A misspelt name gives a decoder; the checks of values
    report the name.
    """
    chosen = FAMILIES.get(values.get("model"), DecoderConfig)
    return chosen(**{one.name: values[one.name] for one in fields(chosen) if one.name in values})
