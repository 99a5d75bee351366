"""Textbook claims about partitioned training, one table each."""
