"""The place of a rank, and the facts about its host and environment that decide results."""

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpipar.config.text import counted
from mpipar.errors import UsageError
from mpipar.run.console.tables import nbytes
from mpipar.run.process.environment import host_name, processor

COPY_BYTES, UNKNOWN_CACHE = 64 << 20, 32 << 20
LINKS = ("same node", "between nodes")
VARIABLES = re.compile(r"(MPI|UCX|FI_|OMPI|PRTE|HYDRA|I_MPI|NCCL|SLURM_|CUDA_VIS|.*_NUM_THREADS)")


def seconds_of(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each of some calls."""
    found = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return found


def copy_rate() -> float:
    """Return GB/s of a memory copy, best of three: what is normal inside a host."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    return COPY_BYTES / min(seconds_of(lambda: np.copyto(target, source), 3)) * 1e-9


def read(path: Path) -> str:
    """Return the text of a small file of the system; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cache_bytes(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Return the size of the last-level cache; 32 MiB if the system does not report it."""
    sizes = [0]
    for path in Path(folder).glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]])
    return max(sizes) or UNKNOWN_CACHE


def free_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Return the memory that this host has available; very much if it does not report it."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", read(Path(meminfo)), re.MULTILINE)
    return int(found[1]) << 10 if found else 1 << 62


def check_room(needed: int, ranks: int, free: int) -> None:
    """Raise UsageError if the buffers of all ranks of a host do not fit into its free memory.

    needed: bytes of a rank.
    """
    if needed * ranks > free:
        raise UsageError(
            f"buffers of {nbytes(needed)} on each of {ranks} ranks of a host, which has"
            f" {nbytes(free)} free: give a smaller -e (--end-bytes) or --window"
        )


def cards(system: Path = Path("/sys")) -> list[str]:
    """Return this host's real network cards that are up, with their rates where known."""
    found = [
        f"{path.name} {read(path / 'ports/1/rate')}"
        for path in sorted((system / "class/infiniband").glob("*"))
        if "ACTIVE" in read(path / "ports/1/state")
    ]
    for path in sorted((system / "class/net").glob("*")):
        if (path / "device").exists() and read(path / "operstate") == "up":
            speed = read(path / "speed")
            found.append(
                path.name + (f" {int(speed) / 1000:g} Gbit/s" if speed.isdecimal() else "")
            )
    return found


def huge_pages(system: Path = Path("/sys")) -> str:
    """Return always, madvise or never: it alone can explain different times at 2 MiB."""
    chosen = re.search(r"\[(\w+)\]", read(system / "kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else "unknown"


def place_fact(ops: Any) -> dict[str, Any]:
    """Return where this rank runs; for arrays on a GPU also gpu, its own."""
    cores = sorted(os.sched_getaffinity(0))
    own = {} if ops.device == "cpu" else {"gpu": ops.xp.cuda.Device().pci_bus_id}
    return own | {
        "host": host_name(os.environ),
        "cores": cores,
        "cpu": processor()[0] or platform.machine(),
        "cards": cards(),
        "huge_pages": huge_pages(),
    }


def environment() -> dict[str, str]:
    """Return the variables that decide how messages travel."""
    return {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)}


def link_of(places: list[dict[str, Any]], ranks: Any) -> str:
    """Return the slowest kind of link in a group."""
    return LINKS[len({places[number]["host"] for number in ranks}) > 1]


def describe(places: list[dict[str, Any]]) -> str:
    """Return ranks, hosts, processor and network cards in one line."""
    hosts = list(dict.fromkeys(place["host"] for place in places))
    names = ", ".join(hosts[:3]) + (", ..." if len(hosts) > 3 else "")
    found = list(dict.fromkeys(card for place in places for card in place["cards"]))[:4]
    cores = len({(place["host"], core) for place in places for core in place["cores"]})
    return (
        f"{counted(len(places), 'rank')} on {counted(len(hosts), 'host')} ({names}),"
        f" {counted(cores, 'core')}, {places[0]['cpu']}; {', '.join(found) or 'no network card'}"
    )
