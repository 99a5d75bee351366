"""Models: sequences of layers, cut into stages."""
