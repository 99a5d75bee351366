"""Weights in the forms of model files, and the whole state of a run as boxes with a manifest."""
