"""Console output of a run, and the files that every run writes."""
