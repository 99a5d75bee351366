"""The shape of the model that is trained."""

from dataclasses import dataclass

from mpipar.config.layout import divisors, listing
from mpipar.config.setting import setting


@dataclass(frozen=True)
class ModelConfig:
    """A decoder (GPT-2 family, pre-norm, learned positions), or a network of convolutions."""

    model: str = setting("decoder", "decoder of text, or convnet: its D are channels, V classes",
                         choices=("decoder", "convnet"))
    layers: int = setting(4, "blocks: of a transformer, or pairs of convolutions", low=1)
    d_model: int = setting(128, "model width D, in features", low=1)
    heads: int = setting(4, "attention heads H; head width = D/H; tp divides H", low=1)
    ffn: int | None = setting(None, "FFN width F, in features (default 4*D); padded for tp", low=1)
    seq_len: int = setting(64, "tokens per row T; attention memory grows with T^2", low=1)
    vocab_size: int = setting(256, "tokens in the vocabulary V (256 = bytes); padded for tp", low=2)
    tied: bool = setting(True, "the head uses the token embedding's weights (one matrix less)")
    norm: str = setting("layer", "layer = LayerNorm; rms = RMSNorm, which has no mean and no bias",
                        choices=("layer", "rms"))
    ffn_cut: str = setting(
        "pair", "FFN over tp: pair = column + row, one all-reduce; gather = both by output, an "
        "all-gather after each; reduce = both by input, an all-reduce after each",
        choices=("pair", "gather", "reduce"))
    sequence_parallel: bool = setting(
        False, "cut tokens over tp between the products: norms, residuals, stash and messages / tp")
    tp_matmul: str = setting(
        "plain", "ring: with --sequence-parallel, tokens travel in pieces while others are "
        "multiplied", choices=("plain", "ring"))
    image_shape: tuple[int, ...] = setting(
        (8, 8, 1), "convnet: height, width and channels of an image", low=1)
    stem_stride: int = setting(
        1, "convnet: step of the first convolution; 2 = a quarter of the work", low=1)


def model_problems(model: ModelConfig, bad: set[str]) -> list[str]:
    """What is wrong between the fields of a model; a relation with one in `bad` is not judged."""
    found = []
    if not bad & {"d_model", "heads"} and model.d_model % model.heads:
        found.append(f"--heads {model.heads}: must divide --d-model {model.d_model}; "
                     f"use {listing(divisors(model.d_model), model.heads)}")
    if model.tp_matmul == "ring" and not model.sequence_parallel:
        found.append("--tp-matmul ring: cuts the barriers of --sequence-parallel in pieces; add "
                     "--sequence-parallel, or leave it out")
    if model.ffn_cut != "pair" and model.sequence_parallel and "ffn_cut" not in bad:
        found.append(f"--ffn-cut {model.ffn_cut}: keeps all tokens on every rank, which "
                     "--sequence-parallel does not; give one of them")
    if not bad & {"model", "image_shape", "stem_stride"}:
        found += image_problems(model)
    return found


def whole_heads(model) -> int:
    """Attention heads of a ModelConfig, which tp must divide; 0 for a convnet, which has none."""
    return model.heads if model.model == "decoder" else 0


def image_problems(model) -> list[str]:
    """What is wrong with the images of a ModelConfig's convnet; the pooling needs 2 x 2 places."""
    shape = ",".join(map(str, model.image_shape))
    if len(model.image_shape) != 3:
        return [f"--image-shape {shape}: must be height,width,channels, as in 8,8,1"]
    least = model.stem_stride + 1
    if min(model.image_shape[:2]) < least:
        return [(f"--image-shape {shape}: with --stem-stride {model.stem_stride} height and width"
                 f" must be at least {least}, for the pooling after it")]
    return []
