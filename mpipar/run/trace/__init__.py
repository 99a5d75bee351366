"""The trace of chosen steps of a run: how it is recorded, written and read."""
