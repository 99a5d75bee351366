"""Layers: they own parameters, biases, the stash and the names of barriers.

Every layer has `forward(x, stash) -> y`, `backward_input(dy, stash) -> dx`,
`backward_weight(stash)` and `params`. backward_input needs what forward left in the stash, and
backward_weight what backward_input left. After backward_weight nothing of the layer is left in it.
"""
