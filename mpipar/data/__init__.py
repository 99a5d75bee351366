"""Rows of text and images: where they come from, which of them a step trains on, and a bigram model
to compare with.

The data of a model is a module with `load`, `Rows` and `blank_batch`.
"""

from mpipar.data import images, rows

DATA = {"decoder": rows, "convnet": images}


def data_of(config):
    """The module of what a ModelConfig's model reads."""
    return DATA[config.model]
