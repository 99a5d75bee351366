"""Data: tokens from text, the rows of each step, and a bigram model for comparison."""

from mpipar.data import rows
from mpipar.data.token_file import Piece, TokenFiles


def arrays_of(parts) -> list:
    """Return the arrays of both parts of the data."""
    return [array for part in parts for array in rows.arrays(part)]


def pieces_of(arrays) -> list[Piece]:
    """Return the pieces of token files among the arrays of data."""
    return [piece for array in arrays if isinstance(array, TokenFiles) for piece in array.pieces]
