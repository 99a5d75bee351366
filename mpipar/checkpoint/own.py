"""mpipar's own form of models that Hugging Face's does not cover: convnets, decoders with RMSNorm.

Tensors have the names and shapes of the parameters.
"""

from __future__ import annotations

from mpipar.files.text import shown

PREFIX = ""  # of the names
KIND = "mpipar-"  # begins a model_type
NUMBERS = {  # fields of ModelConfig that config.json gives, each at least 1
    "convnet": ("layers", "channels", "ffn", "classes", "stem_stride"),
    "decoder": ("layers", "d_model", "ffn", "vocab_size", "heads", "seq_len"),
}
COMPUTED: dict[str, tuple] = {}  # nothing that this form can state is left out
READ = {"norm", "tied", "image_shape", *(name for names in NUMBERS.values() for name in names)}
NORMS = {"convnet": ("layer", "rms"), "decoder": ("rms",)}


def file_name(name: str) -> str:
    """The name in mpipar's files."""
    return name


def disk_shape(param) -> tuple[int, ...]:
    """Shape in the file: a convolution's weight is (k, k, C, N), that of qkv (D, 3, H, d)."""
    return tuple(param.shape)


def to_json(model, dtype: str) -> dict:
    """The config.json of a resolved ModelConfig whose weights are written as `dtype`."""
    more = {"image_shape": list(model.image_shape)} if model.model == "convnet" else {
        "tied": model.tied}
    return {"model_type": KIND + model.model, "norm": model.norm, **more, "torch_dtype": dtype,
            **{name: getattr(model, name) for name in NUMBERS[model.model]}}


def settings(found: dict) -> dict:
    """The ModelConfig fields that a config.json fixes; raises KeyError or TypeError."""
    model = found["model_type"].removeprefix(KIND)
    values = {name: found[name] for name in NUMBERS[model]}
    shape = tuple(found["image_shape"]) if model == "convnet" else ()
    for name, value in [*values.items(), *(("image_shape", side) for side in shape)]:
        if type(value) is not int or value < 1:
            raise TypeError(f"{name} is {shown(value)}")
    values["norm"] = found["norm"]
    if values["norm"] not in NORMS[model]:
        raise TypeError(f"norm is {shown(values['norm'])}")
    if model == "convnet":
        return values | {"model": model, "image_shape": shape}
    if type(found["tied"]) is not bool:
        raise TypeError(f"tied is {shown(found['tied'])}")
    return values | {"model": model, "tied": found["tied"]}


def differences(found: dict, seq_len: int) -> list[str]:
    """Nothing: this form cannot state what mpipar's layers do not compute."""
    return []
