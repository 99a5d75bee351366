"""Data: tokens from text, the rows of each step, images, and a bigram model to compare with.

The data of a model is a module with `load`, `evaluated`, `Rows`, `arrays` and `blank_batch`.
"""

from mpipar.data import images, rows
from mpipar.data.fingerprint import fingerprint

DATA = {"decoder": rows, "convnet": images}


def data_of(config):
    """The module for the data that a ModelConfig's model reads."""
    return DATA[config.model]


def fingerprint_of(config, parts) -> dict:
    """The fingerprint of both parts of the data that a ModelConfig's model reads."""
    return fingerprint([array for part in parts for array in data_of(config).arrays(part)])
