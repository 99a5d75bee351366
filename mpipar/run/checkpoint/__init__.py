"""Weights in the formats of model files, and the whole state of a run as boxes with a manifest."""
