"""Rows of text: where tokens come from, which rows a step trains on, and a bigram model to compare
with.
"""
