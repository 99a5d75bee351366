"""Measurements: each checks first that the data is right, then times it."""
