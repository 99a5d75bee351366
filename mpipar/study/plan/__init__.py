"""The choice of a layout: a model of a step's time and memory on a machine, and a search."""
