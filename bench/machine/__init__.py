"""The cost model of a machine: what bench.calibrate fits and bench.verify compares."""
