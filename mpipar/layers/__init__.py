"""Layers: they own parameters, biases, the stash and the names of barriers.

Every layer has `forward(x, stash) -> y`, `backward_input(dy, stash) -> dx`,
`backward_weight(stash)` and `params`. backward_input needs forward's stash, backward_weight needs
backward_input's; after backward_weight nothing of the layer is left in the stash.
"""
