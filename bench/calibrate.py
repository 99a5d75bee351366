"""Fits the cost model of this machine, including the cost of computing.

    mpiexec -n 2 python -m bench.calibrate --out machine.json
    mpiexec -n 2 python -m bench.calibrate rows.jsonl --out machine.json

Messages and collectives give latency and bandwidth by range of sizes, for each operation, kind of
link and number of ranks. They also give duplex and contention factors, the core time that sending
costs the sender, and the cost of a call through mpipar.comm. FILEs come from bench.interconnect
--json; without any, the needed cases are run here. Products and the passes of a model are measured
here, on as many ranks at once as there are cores.

--seconds is about the time of the whole command. At most a quarter of it goes to computing, before
the messages, and as much to passes after them. In between, each operation is measured at as many
sizes as there is time for, up to --end-bytes, and then in further rounds. Among a size's rounds the
one with the lowest median is taken, because the model describes the undisturbed machine; among
several launches, the median.
"""

from __future__ import annotations

from dataclasses import replace

from bench import results
from bench.interconnect import plans, records
from bench.interconnect.budget import SECONDS, Budget, add_seconds, seconds_problems
from bench.interconnect.buffers import Arena, cache_bytes
from bench.interconnect.cases import COMM
from bench.machine.fitting import (
    LEAST_SIZES,
    REDUCTION,
    contention,
    curves,
    describe_machine,
    duplex,
    fit,
    fittable,
    overhead,
    quietest,
)
from bench.machine.measuring import (
    BEGIN_BYTES,
    END_BYTES,
    FACTOR,
    ROUNDS,
    measure_passes,
    measure_products,
    measure_reduction,
    measure_rows,
    measure_sends,
    several,
    step_config,
)
from bench.machine.units import as_measured, units_of, update_seconds
from bench.program import Program
from mpipar import ops as ops_module
from mpipar.comm.hosts import cores_of
from mpipar.config import flags
from mpipar.config.reading import read
from mpipar.config.sizes import read_bytes
from mpipar.errors import EXIT_INTERRUPTED, EXIT_OK, DataError, UsageError
from mpipar.plan import machine_file
from mpipar.plan.machine import Machine

COMPUTING = 1 / 4  # of the time, at most
MESSAGES = 2 / 3  # of the remaining time; the rest is for passes again
ROWS = (1, 2, 4)  # of a microbatch: the preset `tiny` has these on 4, 2 and 1 replicas


def add_flags(parser) -> None:
    """Add the flags that say what is measured, and for how long."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="file of bench.interconnect --json (default: run the needed cases)",
    )
    parser.add_argument("--out", default="machine.json", help="the cost model (machine.json)")
    add_seconds(parser)
    parser.add_argument(
        "--end-bytes", default=END_BYTES, metavar="SIZE", help=f"largest message ({END_BYTES})"
    )
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="the model whose passes are measured, as mpipar train --print-config "
        "shows it (the preset tiny)",
    )
    parser.add_argument(
        "--rows",
        type=flags.counts,
        default=ROWS,
        metavar="1,2,4",
        help="rows of a microbatch for the passes (1,2,4)",
    )
    parser.add_argument(
        "--tp",
        type=flags.counts,
        default=(1,),
        metavar="1,2",
        help="tensor-parallel ranks for the passes (1)",
    )
    parser.add_argument(
        "--only-steps",
        action="store_true",
        help="only what the prediction of a step reads: messages, all-reduces and passes",
    )
    parser.add_argument(
        "--no-compute", action="store_true", help="no products, no reductions, no passes"
    )


def check(args, parser) -> None:
    """Check that the flags fit together. Raises UsageError."""
    found = plans.size_problems({"--end-bytes": args.end_bytes})
    least = round(BEGIN_BYTES * FACTOR ** (LEAST_SIZES - 1))
    if not found and read_bytes(args.end_bytes) < least:
        found.append(
            f"--end-bytes {args.end_bytes}: a fit needs {LEAST_SIZES} sizes; give {least} or more"
        )
    found += seconds_problems(args.seconds)
    if args.files and args.json:
        found.append(
            "--json keeps rows that are measured here, but FILEs contain them already;"
            " give one of the two"
        )
    if args.files and (
        args.end_bytes != END_BYTES or (args.no_compute and args.seconds != SECONDS)
    ):
        found.append(
            "--end-bytes, and with --no-compute --seconds, are for what is measured here, "
            "but FILEs hold it already; leave them out"
        )
    if args.no_compute and (args.config or args.rows != ROWS or args.tp != (1,)):
        found.append("--config, --rows and --tp are for the passes, which --no-compute leaves out")
    args.reading = read({"config": args.config})
    if found := found or args.reading.problems:
        raise UsageError(found)


def pass_configs(args, config, world_size: int) -> list:
    """Return a resolved config for each tp and number of rows. Raises UsageError."""
    if bad := [tp for tp in args.tp if world_size % tp]:
        raise UsageError([f"--tp {tp}: does not divide the {world_size} ranks" for tp in bad])
    config = replace(config, memory=as_measured(config.memory))
    return [
        step_config(config, rows, world_size, dp=world_size // tp, tp=tp)
        for tp in args.tp
        for rows in args.rows
    ]


def read_rows(paths) -> tuple[list[dict], list[dict]]:
    """Return the rows and heads of these files. Raises DataError if no model fits to them."""
    heads = [run.head for path in paths for run in records.read(path)]
    rows = records.rows_of(paths)
    if any(row["sync"] == "none" for row in rows):
        raise DataError(
            f"{', '.join(paths)}: calls back to back do not give the time of one call;"
            " measure with --sync barrier or deadline"
        )
    for name in ("transport", "dtype", "buffers"):
        if len(kinds := sorted({row[name] for row in rows})) > 1:
            raise DataError(
                f"{', '.join(paths)}: {name} {' and '.join(kinds)}: one model cannot"
                " hold both; fit each separately"
            )
    if not fittable(rows):
        raise DataError(
            f"{', '.join(paths)}: no operation through {COMM} with {LEAST_SIZES} sizes"
            " or more to fit"
        )
    return rows, heads


def provenance(heads, paths) -> dict:
    """Return the sources of the numbers: files, machine, library."""
    first = heads[0]
    same = {name: first[name] for name in ("library", "revision", "places", "transport", "dtype")}
    return {
        "machine": results.machine(),
        "files": list(paths),
        "launches": len(heads),
        **same,
        "rows_measured_on": first["machine"],
        "buffers": sorted({head["buffers"] for head in heads}),
    }


def calibrate(args, session) -> int:
    """Measure, fit, write. Every rank must call it: they compute together."""
    config, world = args.reading.config, session.world

    def prepared():
        """Check everything that can be wrong before anything is measured."""
        machine_file.check_writable(args.out)
        given = read_rows(args.files) if args.files else None
        if given is None:
            several(world.size)
        return given, [] if args.no_compute else pass_configs(args, config, world.size)

    given, configs = session.agree(prepared)
    budget = Budget(world, args.seconds)
    ops = ops_module.make("cpu", config.run.dtype)
    products, updates, reduction = (), [], []
    before = measure_passes(world, ops, configs, budget.part(COMPUTING))
    if configs:
        products = () if args.only_steps else measure_products(world, ops)
        updates = [update_seconds(one, ops, world, ROUNDS) for one in configs]
        world.Barrier()
        data = measure_reduction(Arena(ops, "rotated", cache_bytes()))
        reduction = [fit(REDUCTION, "same socket", 1, data)]
    with session.stop_on_request():
        rows, heads = given or measure_rows(
            session, config.run.dtype, args, budget.part(MESSAGES if configs else 1)
        )
        if session.stop_requested:
            return EXIT_INTERRUPTED
    eager, sends = (
        ((), []) if args.files else measure_sends(world, ops, heads, read_bytes(args.end_bytes))
    )
    # A machine may be slow for some seconds, so passes are measured at both ends of the command.
    later = measure_passes(world, ops, configs, budget)
    cores = cores_of(world).cores
    if world.rank == 0:
        rows = quietest(rows)
        units = [
            replace(units_of(one, [early, late]), update_seconds_per_parameter=update)
            for one, early, late, update in zip(configs, before, later, updates, strict=True)
        ]
        machine = Machine(
            (*curves(rows), *sends, *reduction),
            duplex(rows),
            eager,
            contention(rows),
            overhead(rows),
            products,
            tuple(units),
            world.size,
            cores,
            provenance(heads, args.files or [args.json] * bool(args.json)),
        )
        machine_file.save(machine, args.out)
        print(describe_machine(machine))
    return EXIT_OK


main = Program(
    "calibrate",
    __doc__,
    calibrate,
    together=True,
    add=add_flags,
    check=check,
    json="keep the rows that are measured here",
).started(__name__)
