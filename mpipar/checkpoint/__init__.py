"""Weights on disk, streamed: Hugging Face's form of a GPT-2, and the form of other models."""
