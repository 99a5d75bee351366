"""What a run prints, and the files that every run writes."""
