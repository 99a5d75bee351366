"""Whole lives of runs over all combinations of choices, each compared with one plain rank."""
