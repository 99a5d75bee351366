"""Partitioned decoder training on plain MPI and NumPy or CuPy, in which nothing is hidden.

The names of LIBRARY are a small library: a layer, a cut or a schedule can be used without the
command. Each is imported when it is asked for. Importing mpipar loads neither NumPy nor MPI,
because the command has to set the number of BLAS threads before NumPy is loaded.
"""

import importlib

__version__ = "0.3.0"

LIBRARY = {  # name: where it is
    "CUTS": "layers.linears.LINEARS",
    "Attention": "layers.attention.Attention",
    "Comms": "comm.groups.Comms",
    "Context": "layers.context.Context",
    "CrossEntropy": "layers.loss.CrossEntropy",
    "Embedding": "layers.embedding.Embedding",
    "Engine": "pipeline.engine.Engine",
    "FeedForward": "layers.ffn.FeedForward",
    "FlatParams": "layers.flat.FlatParams",
    "Grid": "comm.grid.Grid",
    "Head": "layers.loss.Head",
    "LayerNorm": "layers.norm.LayerNorm",
    "ColumnLinear": "layers.parallel.column.ColumnLinear",
    "Linear": "layers.linears.make_linear",
    "Param": "layers.param.Param",
    "RMSNorm": "layers.norm.RMSNorm",
    "Recorder": "comm.recorder.Recorder",
    "RowLinear": "layers.parallel.row.RowLinear",
    "Stash": "layers.stash.Stash",
    "lower_schedule": "pipeline.lowering.lower",
    "make_ops": "ops.make",
    "make_schedule": "pipeline.schedules.catalog.make_schedule",
}
__all__ = list(LIBRARY)


def __getattr__(name):
    if name not in LIBRARY:
        raise AttributeError(f"module 'mpipar' has no attribute {name!r}")
    module, _, attribute = LIBRARY[name].rpartition(".")
    return getattr(importlib.import_module(f"mpipar.{module}"), attribute)


def __dir__():
    return [*globals(), *LIBRARY]
