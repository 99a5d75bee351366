"""`mpipar doctor`: which MPI, launcher, hosts, cores, threads and GPUs these ranks really have.

It reports only facts that the ranks themselves can see, and calls the others unknown.
"""

import math
import os
import platform
from dataclasses import dataclass
from importlib import import_module

from mpipar.comm.objects import gather_objects
from mpipar.commands.command import Command, Context
from mpipar.config.setting import switch
from mpipar.errors import EXIT_OK, broken
from mpipar.run.process import blas, consistency, gpus, limits, mpi, self_test
from mpipar.run.process.consistency import ranges


@dataclass(frozen=True)
class DoctorArguments:
    """What doctor is asked for."""

    deep: bool = switch(
        f"also send messages of more than 2^31 bytes, with {self_test.ENOUGH >> 30} GiB of memory"
    )


def run(context: Context) -> int:
    """Print the facts of all ranks on world rank 0.

    Comm: that of `tested`, and one gather over the world.
    """
    import_module("numpy")  # with its BLAS library, which `rank_facts` looks for
    session = context.session
    world = session.start()
    own = rank_facts(world.Get_rank(), session.host_rank) | tested(world, context.args.deep)
    facts = gather_objects(world, own)
    if facts is not None:
        lines = [*job_lines(session, facts), "", *rank_table(facts), *remarks(facts)]
        if session.launcher.name is None:
            lines += launch_remarks(mpi.library_name(world), len(facts[0]["cores"]), os.geteuid())
        print("\n".join(lines))
    return EXIT_OK


def tested(world, deep: bool) -> dict:
    """Return what this rank finds wrong in the MPI library, and how long the test took.

    Comm: that of `timed_test`, and of `long_messages`.
    """
    if isinstance(world, mpi.OneRank):
        return {}
    wrong, tested_ms = self_test.timed_test(world)
    return {
        "tested_ms": tested_ms,
        "wrong": wrong,
        "long": self_test.long_messages(world) if deep else None,
    }


def self_test_text(facts: list[dict]) -> str:
    """Return what the self-test of the MPI library has found."""
    wrong, long = (
        list(dict.fromkeys(words for fact in facts for words in fact[key] or ()))
        for key in ("wrong", "long")
    )
    text = f"{', '.join(wrong)} wrong" if wrong else "all results right"
    if wrong == [self_test.UNUSED]:
        text += ", which mpipar does not use; its own reductions are right"
    text += f"; took {max(fact['tested_ms'] for fact in facts):.2g} ms"
    if facts[0]["long"] is None:
        return f"{text}; --deep also tests messages beyond 2^31 bytes"
    return f"{text}; {', '.join(long) or 'messages beyond 2^31 bytes arrive'}"


def rank_facts(world_rank: int, host_rank: int) -> dict:
    """Return what one rank sees of its host, including `gpu` and `gpus` if it has one."""
    pools = blas.pools()
    return {
        "world_rank": world_rank,
        "host": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)),
        "blas": list(map(blas.shown, pools)),
        "limits": f"{limits.shared_free() / limits.MIB:.4g} MiB free in {limits.SHARED},"
        f" open files {limits.open_files()}",
        "quota": quota if (quota := limits.cpu_quota()) < math.inf else None,
        "threads": max((pool["num_threads"] for pool in pools), default=1),
        **own_device(host_rank),
    }


def own_device(host_rank: int) -> dict:
    """Return the GPU of the host_rank-th rank of a host; ranks take a host's GPUs round-robin."""
    from mpipar.ops.cuda.epilogues import library  # late: it loads NumPy

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
    suffix = "no cuBLASLt" if isinstance(library(cupy), OSError) else "cuBLASLt"
    return own | {"device": f"{index} of {count}: {name}, PCI {own['gpu']}, {suffix}"}


def job_lines(session, facts: list[dict]) -> list[str]:
    """Return the lines about the whole job."""
    hosts = {fact["host"] for fact in facts}
    versions = ", ".join(f"{name} {session.facts[name]}" for name in consistency.PROGRAMS)
    rows = [
        ("versions", versions),
        ("MPI library", mpi.library_name(session.world)),
        ("launcher", session.launcher.name or "none (one process)"),
        ("ranks", f"{len(facts)} on {len(hosts)} host(s)"),
        *([] if isinstance(session.world, mpi.OneRank) else library_rows(facts)),
        ("BLAS", ", ".join(facts[0]["blas"]) or "not seen"),
        ("BLAS threads", f"{facts[0]['threads']} per rank"),
        ("limits", facts[0]["limits"]),
    ]
    return [f"{title:<15}{text}" for title, text in rows]


def library_rows(facts: list[dict]) -> list[tuple[str, str]]:
    """Return what the MPI library can do."""
    from mpi4py import MPI

    from mpipar.comm.groups import gpu_awareness

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return [
        ("MPI standard", ".".join(map(str, MPI.Get_version()))),
        ("thread level", levels[MPI.Query_thread()]),
        ("GPU-aware MPI", "{} ({})".format(*gpu_awareness())),
        ("MPI self-test", self_test_text(facts)),
    ]


def rank_table(facts: list[dict]) -> list[str]:
    """Return one line per rank: host, cores, BLAS threads, device."""
    from mpipar.run.console.tables import table  # late: it loads NumPy

    rows = [
        (fact["world_rank"], fact["host"], ranges(fact["cores"]), fact["threads"], fact["device"])
        for fact in facts
    ]
    return table([("rank", "host", "cores", "threads", "device"), *rows], left=5).splitlines()


def remarks(facts: list[dict]) -> list[str]:
    """Return what to change, or to keep in mind, if the table shows a problem."""
    found = []
    for host in sorted({fact["host"] for fact in facts}):
        here = [fact for fact in facts if fact["host"] == host]
        ranks, cores = len(here), len(set().union(*(fact["cores"] for fact in here)))
        threads = sum(fact["threads"] for fact in here)
        quota = here[0].get("quota") or math.inf
        found += broken(
            (
                ranks > cores,
                (
                    f"{host}: {ranks} ranks share {cores} core(s): times measured here say little"
                    " about a machine with a core for each rank"
                ),
            ),
            (
                ranks <= cores < threads,
                (
                    f"{host}: {threads} BLAS threads on {cores} core(s): set"
                    f" OPENBLAS_NUM_THREADS={max(1, cores // ranks)}"
                ),
            ),
            (
                threads > quota,
                (
                    f"{host}: a control group (a container's limit) allows the time of {quota:g}"
                    f" cores, but there are {threads} BLAS threads: start fewer ranks, or set"
                    f" OPENBLAS_NUM_THREADS={max(1, int(min(quota, threads)) // ranks)}"
                ),
            ),
        )
    found += gpus.remarks(fact | {"rank": fact["world_rank"]} for fact in facts)
    return ["", *found] if found else []


def launch_remarks(library: str, cores: int, user: int) -> list[str]:
    """Return what Open MPI's mpiexec needs here, which says so only in many lines."""
    many = "--oversubscribe" if library.startswith("Open MPI v4") else "--map-by :OVERSUBSCRIBE"
    root = " as root it also needs --allow-run-as-root;" if user == 0 else ""
    words = (
        f"Open MPI's mpiexec refuses more ranks than cores ({cores}) without {many};{root}"
        " see docs/install.md"
    )
    return ["", words] if library.startswith("Open MPI") else []


COMMAND = Command(run, usage="[--deep]", arguments=DoctorArguments, needs_mpi=True)
