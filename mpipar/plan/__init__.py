"""Costs of layouts and the choice among them: cost models, predictions and a search."""
