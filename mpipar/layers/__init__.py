"""Layers: each owns its parameters, its entries in the stash and the names of its barriers."""
