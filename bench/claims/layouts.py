"""The model of bench.claims in any layout, as a decoder or a convnet; layouts in words."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mpipar.config.model import ConvnetConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import OF_EVERY_FAMILY, build

MODEL = {"layers": 8, "d_model": 256, "heads": 8, "seq_len": 128}


def configure(layout: dict, num_microbatches: int = 8, schedule: str = "1f1b", **settings):
    """The claims' model in a layout, 16 rows per step, with some other settings."""
    values = {"dp": 1, "pp": 1, "tp": 1, "batch_size": 16} | MODEL | layout | settings
    values |= {"num_microbatches": num_microbatches // values["dp"], "schedule": schedule}
    return resolve(build(values), prod(layout.values()))[0]


def as_convnet(config):
    """The same with a convnet of the decoder's widths.

    Behind its stem an image has as many places as a row of the decoder has tokens.
    """
    same = {name: getattr(config.model, name) for name in OF_EVERY_FAMILY - {"model"}}
    return replace(config, model=ConvnetConfig(
        channels=config.model.d_model, image_shape=(16, 32, 3), **same))


def layout_name(layout: dict) -> str:
    """The axes with their sizes, as in "pp 2 x dp 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())
