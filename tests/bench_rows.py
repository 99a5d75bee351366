"""Rows and files as bench.interconnect writes them, for the tests of the tools that read them."""

import contextlib
import types

import numpy as np

from bench.interconnect import records, statistics
from mpipar.job.one_rank import OneRank

COMM, BARE = "mpipar.comm", "mpi4py"
ONE = OneRank("none is needed")
# A job of one rank, and a session without a launcher.
SESSION = types.SimpleNamespace(
    start=lambda: ONE, host_rank=0, world=ONE, agree=lambda function: function()
)
ALONE = types.SimpleNamespace(
    launcher=types.SimpleNamespace(size=1),
    stop_requested=False,
    stop_on_request=contextlib.nullcontext,
)


def row(case="all-reduce", via=COMM, size=1024, times=None, median=10.0, ranks=(0, 1), **changes):
    """A row as the benchmark writes it; times: microseconds of its iterations."""
    times = np.full(50, median) if times is None else np.asarray(times, float)
    left = np.stack([times * 900, times * 1000], axis=1).round().astype(np.int64)
    value = {
        "case": case,
        "via": via,
        "transport": "mpi-host",
        "axis": "world",
        "mode": "",
        "ranks": list(ranks),
        "link": "same node",
        "dtype": "float32",
        "buffers": "rotated",
        "in_place": False,
        "window": 1,
        "per_sample": 1,
        "size_bytes": size,
        "count": size // 4,
        "bytes_per_rank_in": size,
        "bytes_per_rank_out": size,
        "bytes_on_wire_per_rank": size,
        "slowest_rank": ranks[-1],
        "slowest_share": 1.0,
        "checked": "ok",
        "sync": "barrier",
        "late": 0,
        "late_at": [],
        "entered_ns": np.zeros_like(left).tolist(),
        "left_ns": left.tolist(),
        "skew_us": 0.0,
    } | changes
    summary = statistics.summary(times)
    return value | summary | statistics.bandwidths(case, len(ranks), size, summary["median_us"])


def write_file(path, rows, status=records.COMPLETE, launches=1, refused=()):
    path.unlink(missing_ok=True)
    for launch in range(launches):
        writer = records.Writer(str(path), append=True)
        writer.head({"launch": launch})
        for one in rows:
            writer.row(one)
        writer.end(status, refused=list(refused))
    return str(path)
