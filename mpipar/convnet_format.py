"""A convnet's form on disk: its own names and shapes of tensors, and config.json."""

from __future__ import annotations

MODEL_TYPE = "mpipar-convnet"
FIELDS = ("layers", "d_model", "ffn", "vocab_size", "stem_stride")


def short_name(name: str) -> str:
    """The name of a parameter in messages and in the order of the file."""
    return name


def file_name(name: str) -> str:
    """The name in our files."""
    return name


def disk_shape(param) -> tuple[int, ...]:
    """Shape in the file: a convolution's weight is (k, k, C, N)."""
    return tuple(param.shape)


def to_json(config, dtype: str) -> dict:
    """What config.json says of a resolved Config whose weights are written as `dtype`."""
    model = config.model
    return {"model_type": MODEL_TYPE, **{name: getattr(model, name) for name in FIELDS},
            "image_shape": list(model.image_shape), "torch_dtype": dtype}


def settings(found: dict) -> dict:
    """The ModelConfig fields that a config.json fixes; raises KeyError or TypeError."""
    values = {name: found[name] for name in FIELDS}
    shape = found["image_shape"]
    for name, value in [*values.items(), *(("image_shape", side) for side in shape)]:
        if type(value) is not int or value < 1:
            raise TypeError(f"{name} is {value!r}")
    return values | {"image_shape": tuple(shape)}


def differences(found: dict) -> list[str]:
    """What a config.json says that these layers do not compute: nothing can be said otherwise."""
    return []
