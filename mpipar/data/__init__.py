"""Rows of text and images: their sources, the rows of each step, and a bigram model to compare
with.

The data of a model is a module with `load`, `Rows` and `blank_batch`.
"""

from mpipar.data import images, rows

DATA = {"decoder": rows, "convnet": images}


def data_of(config):
    """The module for the data that a ModelConfig's model reads."""
    return DATA[config.model]
