"""A training step, compared with the same model in PyTorch."""
