"""The layers of a call compared: C, mpi4py, persistent requests, and mpipar.comm.

    python -m bench.interconnect latency bandwidth all-reduce --ways all --json rows.jsonl
    python -m bench.interconnect.ways rows.jsonl [--write]    # --write: into bench/results/

C runs the loops of loops.c, in the processes of the other ways and in turns with them. What mpi4py
takes beyond that has two parts: `calling_us` is a call from Python and the benchmark's own loop;
`asking_us` is what mpi4py asks of the array. `record_us` is mpipar's part, the record of the call.
Limits: the record costs at most 0.6 us of a latency up to 8 KiB, and 3 % from 1 MiB on. Exit code 1
means that it costs more. If OSU's programs are on the PATH, they run too, each as a job of its own;
their means are in a separate column.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys

from bench.interconnect import launches, records
from bench.interconnect.cases import BARE, COMM, IN_C, PERSISTENT, PREPARED
from bench.program import Outcome, Program
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, DataError

COLUMNS = {
    IN_C: "C_us",
    BARE: "mpi4py_us",
    PERSISTENT: "prepared_us",
    PREPARED: "prepared_us",
    COMM: "mpipar_comm_us",
}
# From C to mpipar.comm: what each step adds.
STEPS = (("calling_us", IN_C, PREPARED), ("asking_us", PREPARED, BARE), ("record_us", BARE, COMM))
LIMIT_US, SMALL_BYTES = 0.6, 8 << 10  # up to the size that OSU's benchmarks call small
LIMIT_SHARE, LARGE_BYTES = 0.03, 1 << 20
OSU = {"latency": "osu_latency", "bandwidth": "osu_bw", "all-reduce": "osu_allreduce"}
OSU_SECONDS = 300


def compared(rows) -> list[dict]:
    """Return a line for each operation and size run in several ways: medians over launches."""
    found: dict = {}
    for row in rows:
        key = (row["case"], row["mode"], tuple(row["ranks"]), row["size_bytes"], row["sync"])
        found.setdefault(key, {}).setdefault(row["via"], []).append(row)
    lines = []
    for (case, _, ranks, size, _), ways in sorted(found.items()):
        times = {
            COLUMNS[via]: statistics.median(row["median_us"] for row in own)
            for via, own in ways.items()
            if via in COLUMNS
        }
        if len(times) < 2:
            continue
        line = {
            "case": case,
            "ranks": len(ranks),
            "size_bytes": size,
            "launches": len({row["launch"] for own in ways.values() for row in own}),
            **{name: times.get(name, "-") for name in COLUMNS.values()},
        }
        for via in (BARE, PERSISTENT):
            known = COLUMNS[via] in times and COLUMNS[IN_C] in times
            line[f"{COLUMNS[via].removesuffix('_us')}_over_C"] = (
                times[COLUMNS[via]] / times[COLUMNS[IN_C]] if known else "-"
            )
        for name, *step in STEPS:
            less, more = (times.get(COLUMNS[via]) for via in step)
            line[name] = "-" if None in (less, more) else more - less
        lines.append(line)
    return lines


def latency_problems(lines) -> list[str]:
    """Return latencies at which the record of a call costs more than is allowed."""
    found = []
    for line in lines:
        if line["case"] != "latency" or line["record_us"] == "-":
            continue
        size, more = line["size_bytes"], line["record_us"]
        share = more / line["mpi4py_us"]
        if (size <= SMALL_BYTES and more > LIMIT_US) or (
            size >= LARGE_BYTES and share > LIMIT_SHARE
        ):
            found.append(f"latency of {size} bytes: {more:.2f} us ({share:.1%}) above bare mpi4py")
    return found


def osu_numbers(text: str, case: str) -> dict[int, float]:
    """Return {size: us of a message} from an OSU program's output; bandwidths in MB/s = 1e6."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].isdecimal():
            size, value = int(words[0]), float(words[1])
            found[size] = size / value if case == "bandwidth" else value
    return found


def with_osu(lines) -> list[dict]:
    """Return the lines with the column osu_us, if OSU's program for the case is installed."""
    times: dict = {}
    for case, program in OSU.items():
        if (path := shutil.which(program)) and any(line["case"] == case for line in lines):
            sizes = [line["size_bytes"] for line in lines if line["case"] == case]
            ranks = max(line["ranks"] for line in lines if line["case"] == case)
            try:
                done = subprocess.run(
                    [
                        launches.own_launcher(),
                        "-n",
                        str(ranks),
                        path,
                        "-m",
                        f"{max(1, min(sizes))}:{max(sizes)}",
                    ],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=launches.environment_of_jobs(),
                    timeout=OSU_SECONDS,
                )
            except subprocess.SubprocessError as error:  # such as one built for another MPI
                print(
                    f"{program} is left out: {error}; {(error.stderr or '').strip()[-300:]}",
                    file=sys.stderr,
                )
                continue
            times[case] = osu_numbers(done.stdout, case)
    if not times:
        return lines
    return [
        line | {"osu_us": times.get(line["case"], {}).get(line["size_bytes"], "-")}
        for line in lines
    ]


def measured(args, session) -> Outcome:
    """Return the lines of the file; code 1 if a latency costs more than is allowed."""
    lines = with_osu(compared(records.rows_of([args.file], tell=True)))
    if not lines:
        raise DataError(f"{args.file}: nothing was run in two ways: measure with --ways all")
    found = latency_problems(lines)
    return Outcome(
        lines,
        records.facts_of(args.file),
        EXIT_CHECK_FAILED if found else EXIT_OK,
        end="\n".join(found),
    )


main = Program(
    "interconnect.ways",
    __doc__,
    measured,
    kept="bench/results/interconnect.json",
    add=lambda parser: parser.add_argument(
        "file", metavar="FILE", help="of bench.interconnect --json"
    ),
).started(__name__)
