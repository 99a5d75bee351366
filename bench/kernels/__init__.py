"""Kernels of one device: what their compiler reports, and their speed in bench.tiles."""
