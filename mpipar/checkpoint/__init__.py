"""Weights on disk, streamed: Hugging Face's form of a GPT-2, and mpipar's form of other models."""
