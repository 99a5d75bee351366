"""`mpipar doctor`: what MPI, launcher, hosts, cores, threads and GPUs these ranks really have.

It reports only facts that the ranks themselves can see, and calls the others unknown.
"""

import os
import platform

import mpi4py
import numpy as np

from mpipar import __version__
from mpipar.comm.connect import gpu_awareness
from mpipar.comm.facts import gather_facts
from mpipar.errors import EXIT_OK
from mpipar.job import blas, gpus, mpi
from mpipar.job.alike import ranges


def run(session) -> int:
    """Print the facts of all ranks on world rank 0. Comm: one gather over the world."""
    world = session.start()
    facts = gather_facts(world, rank_facts(world.Get_rank(), session.host_rank))
    if facts is not None:
        print("\n".join([*job_lines(session, facts), "", *rank_table(facts), *remarks(facts)]))
    return EXIT_OK


def rank_facts(world_rank: int, host_rank: int) -> dict:
    """What one rank sees of its own host, with gpu and gpus if it has one."""
    pools = blas.pools()
    return {
        "world_rank": world_rank,
        "host": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)),
        "blas": list(map(blas.shown, pools)),
        "loops": next((pool["architecture"] for pool in pools if "architecture" in pool), ""),
        "units": blas.processor()[1],
        "threads": max((pool["num_threads"] for pool in pools), default=1),
        **own_device(host_rank),
    }


def own_device(host_rank: int) -> dict:
    """The GPU that the host_rank-th rank of a host uses; ranks take a host's GPUs in turn."""
    try:
        import cupy
    except ImportError:
        return {"device": "none: CuPy is not installed"}
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return {"device": f"none: {error}"}
    if count == 0:
        return {"device": "none: CuPy sees no GPU"}
    index = host_rank % count
    name = runtime.getDeviceProperties(index)["name"].decode()
    own = gpus.fact(cupy, index)
    return own | {"device": f"{index} of {count}: {name}, PCI {own['gpu']}"}


def job_lines(session, facts: list[dict]) -> list[str]:
    """The lines about the whole job."""
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled",
              MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
    hosts = {fact["host"] for fact in facts}
    versions = {"mpipar": __version__, "Python": platform.python_version(),
                "NumPy": np.__version__, "mpi4py": mpi4py.__version__}
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("MPI library", mpi.library_name()),
        ("MPI standard", ".".join(map(str, MPI.Get_version()))),
        ("launcher", session.launcher.name or "none (one process)"),
        ("ranks", f"{len(facts)} on {len(hosts)} host(s)"),
        ("thread level", levels[MPI.Query_thread()]),
        ("GPU-aware MPI", "{} ({})".format(*gpu_awareness())),
        ("BLAS", ", ".join(facts[0]["blas"]) or "not seen"),
        ("vector units", " ".join(facts[0]["units"]) or "not seen"),
        ("BLAS threads", f"{facts[0]['threads']} per rank"),
    ]
    return [f"{title:<15}{text}" for title, text in rows]


def rank_table(facts: list[dict]) -> list[str]:
    """One line per rank: host, cores, BLAS threads, device."""
    cells = [("rank", "host", "cores", "threads", "device")]
    cells += [(str(fact["world_rank"]), fact["host"], ranges(fact["cores"]), str(fact["threads"]),
               fact["device"]) for fact in facts]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return ["  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)),
                       row[4]]) for row in cells]


def remarks(facts: list[dict]) -> list[str]:
    """What to change, or to keep in mind, if the table shows a problem."""
    found = []
    for host in sorted({fact["host"] for fact in facts}):
        here = [fact for fact in facts if fact["host"] == host]
        cores = set().union(*(fact["cores"] for fact in here))
        threads = sum(fact["threads"] for fact in here)
        if len(here) > len(cores):
            found.append(f"{host}: {len(here)} ranks share {len(cores)} core(s): times measured "
                         "here say little about a machine with a core for each rank")
        elif threads > len(cores):
            found.append(f"{host}: {threads} BLAS threads on {len(cores)} core(s): set "
                         f"OPENBLAS_NUM_THREADS={max(1, len(cores) // len(here))}")
        loops, units = here[0].get("loops"), here[0].get("units", ())
        if loops and (other := blas.untried(loops, units)):
            found.append(f"{host}: BLAS runs loops for {loops}, and the processor has wider vector"
                         f" units; compare with {blas.VARIABLE}={other} (mpipar train tries both,"
                         " and takes the faster)")
    found += gpus.remarks(fact | {"rank": fact["world_rank"]} for fact in facts)
    return ["", *found] if found else []
