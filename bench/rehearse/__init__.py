"""A training step without its model: its messages and collectives on the user's own network."""
