"""A training step, beside the same model in PyTorch."""
