"""A session of one rank without a launcher, for programs of bench/ that a test calls."""

import types

from mpipar.run.process.mpi import OneRank

ONE = OneRank("none is needed")
SESSION = types.SimpleNamespace(
    start=lambda: ONE, host_rank=0, world=ONE, agree=lambda function: function()
)
