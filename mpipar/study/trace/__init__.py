"""Traces of runs: waits and their causes, efficiencies, the HTML page, Perfetto, comparison."""
