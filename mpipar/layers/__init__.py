"""Layers: they own parameters, biases, the stash and the names of barriers."""
