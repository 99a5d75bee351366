"""Measures the interconnect through the calls that training makes, and through bare mpi4py."""
