"""Data: tokens from text, the rows of each step, images, and a bigram model for comparison.

The data of a model is a module with `load`, `evaluated`, `Rows`, `arrays` and `blank_batch`.
"""

from mpipar.data import images, rows
from mpipar.data.token_file import Piece, TokenFiles

DATA = {"decoder": rows, "convnet": images}


def data_of(config):
    """Return the module for the data that a ModelConfig's model reads."""
    return DATA[config.model]


def arrays_of(config, parts) -> list:
    """Return the arrays of both parts of the data that a ModelConfig's model reads."""
    return [array for part in parts for array in data_of(config).arrays(part)]


def pieces_of(arrays) -> list[Piece]:
    """Return the pieces of token files among the arrays of data."""
    return [piece for array in arrays if isinstance(array, TokenFiles) for piece in array.pieces]
