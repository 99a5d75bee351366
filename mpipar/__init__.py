"""Partitioned decoder training on plain MPI and NumPy or CuPy, in which nothing is hidden."""

__version__ = "0.1.0"
