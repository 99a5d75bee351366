"""Data: tokens from text, the rows of each step, and a bigram model for comparison."""
