"""`mpipar doctor`: which MPI, launcher, hosts, cores, threads and GPUs these ranks really have.

It reports only facts that the ranks themselves can see, and calls the others unknown.
"""

import math
import os
import platform
from dataclasses import dataclass

from mpipar.comm.objects import gather_objects
from mpipar.commands.command import Command, Context
from mpipar.config.setting import switch
from mpipar.errors import EXIT_OK, broken
from mpipar.run.process import consistency, environment, mpi, self_test
from mpipar.run.process.consistency import ranges


@dataclass(frozen=True)
class DoctorArguments:
    """What doctor is asked for."""

    deep: bool = switch(
        "also send a message of more than 2^31 bytes, which needs 6 GiB of free memory"
    )


def run(context: Context) -> int:
    """Print the facts of all ranks on world rank 0.

    Comm: that of the self-test, and one gather over the world.
    """
    # late: they load NumPy, and with it the BLAS library that `rank_facts` looks for
    from mpipar.interconnect.hosts import free_bytes
    from mpipar.run.console.tables import table

    session = context.session
    world = session.start()
    own = rank_facts(world.rank, session.host_rank)
    if not isinstance(world, mpi.OneRank):
        own["wrong"] = self_test.wrong_reductions(world)
        own["long"] = self_test.long_message(world, free_bytes()) if context.args.deep else None
    facts = gather_objects(world, own)
    if facts is not None:
        found = remarks(facts)
        if session.launcher.name is None:
            found += launch_remarks(mpi.library_name(world), len(facts[0]["cores"]), os.geteuid())
        rows = [
            (one["world_rank"], one["host"], ranges(one["cores"]), one["threads"], one["device"])
            for one in facts
        ]
        text = table([("rank", "host", "cores", "threads", "device"), *rows], left=5)
        print("\n".join([*job_lines(session, facts), "", text, "", *found]).rstrip())
    return EXIT_OK


def rank_facts(world_rank: int, host_rank: int) -> dict:
    """Return what one rank sees of its host, including `gpu` if it has one."""
    pools = environment.blas_pools()
    return {
        "world_rank": world_rank,
        "host": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)),
        "blas": list(map(environment.blas_words, pools)),
        "limits": f"{environment.shared_free() >> 20} MiB free in {environment.SHARED}, open files"
        f" {environment.open_files()}",
        "quota": quota if (quota := environment.cpu_quota()) < math.inf else None,
        "threads": max((pool["num_threads"] for pool in pools), default=1),
        **own_device(host_rank),
    }


def own_device(host_rank: int) -> dict:
    """Return the GPU of the host_rank-th rank of a host; ranks take a host's GPUs round-robin."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        index = host_rank % count
        gpu = cupy.cuda.Device(index).pci_bus_id
        name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
    except Exception as error:  # noqa: BLE001 (no CuPy, no GPU, or a driver that is too old)
        return {"device": f"none: {error}"}
    return {"device": f"{index} of {count}: {name}, PCI {gpu}", "gpu": gpu}


def job_lines(session, facts: list[dict]) -> list[str]:
    """Return the lines about the whole job."""
    versions = ", ".join(f"{name} {session.facts[name]}" for name in consistency.PROGRAMS)
    rows = [
        ("versions", versions),
        ("MPI library", mpi.library_name(session.world)),
        ("launcher", session.launcher.name or "none (one process)"),
        ("ranks", f"{len(facts)} on {len({fact['host'] for fact in facts})} host(s)"),
        *([] if isinstance(session.world, mpi.OneRank) else library_rows(facts)),
        ("BLAS", ", ".join(facts[0]["blas"]) or "not seen"),
        ("BLAS threads", f"{facts[0]['threads']} per rank"),
        ("limits", facts[0]["limits"]),
    ]
    return [f"{title:<15}{text}" for title, text in rows]


def library_rows(facts: list[dict]) -> list[tuple[str, str]]:
    """Return what the MPI library can do, and what its self-test has found."""
    from mpi4py import MPI

    from mpipar.comm.groups import gpu_awareness

    wrong = list(dict.fromkeys(words for fact in facts for words in fact["wrong"]))
    text = f"{', '.join(wrong)} wrong" if wrong else "all results right"
    if facts[0]["long"] is not None:
        long = next(filter(None, (fact["long"] for fact in facts)), "")
        text += f"; {long or 'a message beyond 2^31 bytes arrives'}"
    return [
        ("MPI standard", ".".join(map(str, MPI.Get_version()))),
        ("thread level", "not " * (MPI.Query_thread() < MPI.THREAD_MULTIPLE) + "multiple"),
        ("GPU-aware MPI", "{} ({})".format(*gpu_awareness())),
        ("MPI self-test", text),
    ]


def remarks(facts: list[dict]) -> list[str]:
    """Return what to change, or to keep in mind, if the table shows a problem."""
    found = []
    for host in sorted({fact["host"] for fact in facts}):
        here = [fact for fact in facts if fact["host"] == host]
        ranks, cores = len(here), len(set().union(*(fact["cores"] for fact in here)))
        threads = sum(fact["threads"] for fact in here)
        allowed = min(cores, here[0].get("quota") or cores)
        cards = [fact["gpu"] for fact in here if "gpu" in fact]
        found += broken(
            (
                ranks > cores,
                (
                    f"{host}: {ranks} ranks share {cores} core(s): times measured here say little"
                    " about a machine with a core for each rank"
                ),
            ),
            (
                ranks <= cores and threads > allowed,
                (
                    f"{host}: {threads} BLAS threads, but the time of {allowed:g} core(s), which a"
                    " container may limit: start fewer ranks, or set"
                    f" OPENBLAS_NUM_THREADS={max(1, int(allowed) // ranks)}"
                ),
            ),
            (
                len(cards) > len({*cards}),
                (
                    f"{host}: {len(cards)} ranks share {len({*cards})} GPU(s): times say little"
                    " about a machine with one GPU per rank"
                ),
            ),
        )
    return found


def launch_remarks(library: str, cores: int, user: int) -> list[str]:
    """Return what Open MPI's mpiexec needs here, which says so only in many lines."""
    if not library.startswith("Open MPI"):
        return []
    many = "--oversubscribe" if library.startswith("Open MPI v4") else "--map-by :OVERSUBSCRIBE"
    root = " as root it also needs --allow-run-as-root;" if user == 0 else ""
    return [
        (
            f"Open MPI's mpiexec refuses more ranks than cores ({cores}) without {many};{root}"
            " see docs/install.md"
        )
    ]


COMMAND = Command(run, usage="[--deep]", arguments=DoctorArguments, needs_mpi=True)
