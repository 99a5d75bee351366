"""Exercises whose answers are numbers or words, each computed from what a run would do."""
