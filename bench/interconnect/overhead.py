"""The cost of a call through mpipar.comm, record included, above a bare mpi4py call.

    python -m bench.interconnect latency --buffers reused --launches 5 --json rows.jsonl
    python -m bench.interconnect.overhead rows.jsonl [--write]    # into bench/results/, for docs/

With reused buffers the latency is that of OSU's benchmarks. The limits above the bare call are 1.5
us for messages up to 8 KiB, and 3 % from 1 MiB on. Exit code 1 says that a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys

from bench import results
from bench.interconnect import records
from bench.interconnect.cases import BARE, COMM
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, DataError
from mpipar.job.session import guard

RESULT = "bench/results/interconnect.json"
LIMIT_US, SMALL_BYTES = 1.5, 8 << 10  # up to the size that OSU's benchmarks call small
LIMIT_SHARE, LARGE_BYTES = 0.03, 1 << 20


def overheads(rows) -> list[dict]:
    """A line for each operation and size done both ways: medians of the launches' medians."""
    found: dict = {}
    for row in rows:
        key = (row["case"], row["mode"], tuple(row["ranks"]), row["size_bytes"], row["sync"])
        found.setdefault(key, {}).setdefault(row["via"], []).append(row)
    lines = []
    for (case, _, ranks, size, _), ways in sorted(found.items()):
        if COMM in ways and BARE in ways:
            ours, bare = (statistics.median(row["median_us"] for row in ways[via])
                          for via in (COMM, BARE))
            launches = {row["launch"] for row in ways[COMM]}
            lines.append({
                "case": case, "ranks": len(ranks), "size_bytes": size,
                "launches": len(launches), "mpi4py_us": bare, "mpipar_comm_us": ours,
                "more_us": ours - bare, "more_percent": (ours / bare - 1) * 100,
                "mpipar_comm_GBps": statistics.median(row["algbw_GBps"] for row in ways[COMM])})
    return lines


def latency_problems(lines) -> list[str]:
    """Latencies at which mpipar.comm costs more than is allowed."""
    found = []
    for line in lines:
        size = line["size_bytes"]
        small = size <= SMALL_BYTES and line["more_us"] > LIMIT_US
        large = size >= LARGE_BYTES and line["more_percent"] > LIMIT_SHARE * 100
        if line["case"] == "latency" and (small or large):
            found.append(f"latency of {size} bytes: {line['more_us']:.2f} us "
                         f"({line['more_percent']:.1f} %) above bare mpi4py")
    return found


def main(argv, session) -> int:
    """Print the lines, check the latencies, write the result file."""
    parser = flags.Parser(prog="python -m bench.interconnect.overhead", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="of bench.interconnect --json")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT}")
    args = parser.parse_args(argv)
    runs = records.read(args.file)
    lines = overheads(records.rows_of([args.file], tell=True))
    if not lines:
        raise DataError(f"{args.file}: nothing that was done through mpipar.comm and by mpi4py")
    print(results.markdown_table(lines))
    if args.write:
        head = runs[0].head
        results.write(str(results.ROOT / RESULT), "bench.interconnect.overhead", lines,
                      **{name: head[name] for name in ("library", "buffers", "dtype")})
    found = latency_problems(lines)
    for text in found:
        print(text, file=sys.stderr)
    return EXIT_CHECK_FAILED if found else EXIT_OK


if __name__ == "__main__":
    guard(main)
