"""The place of a rank, and the state of its host that measurements depend on: /proc and /sys."""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from mpipar.job import gpus
from mpipar.job.environment import host_name

CPUS, NODES, CLASSES = "devices/system/cpu", "devices/system/node", "class"
HUGE = "kernel/mm/transparent_hugepage"


def read(path: Path) -> str:
    """Return the text of a small file of the system; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cores_in(text: str) -> set[int]:
    """Return the numbers of a list as the system writes it: 0-3,8."""
    found: set = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(low), int(high or low) + 1))
    return found


def listed(numbers) -> str:
    """Return numbers as the system lists them: 0-3,8."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def sockets(cores, system: Path = Path("/sys")) -> list[int]:
    """Return the processor packages of some cores; [-1] if the system does not report them."""
    names = (
        read(system / CPUS / f"cpu{core}" / "topology" / "physical_package_id") for core in cores
    )
    return sorted({int(name or -1) for name in names})


def numa_nodes(cores, system: Path = Path("/sys")) -> list[int]:
    """Return the NUMA nodes of some cores; [] if the system does not report them."""
    return sorted(
        int(path.parent.name.removeprefix("node"))
        for path in (system / NODES).glob("node[0-9]*/cpulist")
        if cores_in(read(path)) & set(cores)
    )


def nics(system: Path = Path("/sys")) -> list[dict]:
    """Return this host's network cards that are up: name, NUMA node, Gbit/s.

    NUMA node -1 and 0 Gbit/s stand for unknown values. Only real devices count: no loopback, no
    bridge of containers.
    """
    found = []
    for path in sorted((system / CLASSES / "infiniband").glob("*")):
        rate = re.match(r"[\d.]+", read(path / "ports" / "1" / "rate"))
        if "ACTIVE" in read(path / "ports" / "1" / "state"):
            found.append((path, float(rate[0]) if rate else 0.0))
    for path in sorted((system / CLASSES / "net").glob("*")):
        if (path / "device").exists() and read(path / "operstate") == "up":
            speed = read(path / "speed")
            found.append((path, int(speed) / 1000 if speed.isdecimal() else 0.0))
    return [
        {
            "name": path.name,
            "numa": int(read(path / "device" / "numa_node") or -1),
            "gbit_per_s": rate,
        }
        for path, rate in found
    ]


def huge_pages(system: Path = Path("/sys"), meminfo: Path = Path("/proc/meminfo")) -> dict:
    """Return whether the system provides large pages by itself, and how many are reserved.

    transparent: always, madvise or never. They alone can explain different times at 2 MiB.
    """
    facts = dict(re.findall(r"(\w+):\s+(\d+)", read(meminfo)))
    chosen = {
        name: re.search(r"\[(\w+)\]", read(system / HUGE / name)) for name in ("enabled", "defrag")
    }
    return {
        "transparent": chosen["enabled"][1] if chosen["enabled"] else "unknown",
        "defrag": chosen["defrag"][1] if chosen["defrag"] else "unknown",
        "page_KiB": int(facts.get("Hugepagesize", 0)),
        "set_aside": int(facts.get("HugePages_Total", 0)),
    }


def place_fact(world_rank: int, ops) -> dict:
    """Return where this rank runs; for arrays on a GPU also gpu, its own, and gpus, all visible."""
    cores = sorted(os.sched_getaffinity(0))
    own = {} if ops.device == "cpu" else gpus.fact(ops.xp, ops.xp.cuda.Device().id)
    return own | {
        "rank": world_rank,
        "host": host_name(os.environ),
        "cores": cores,
        "sockets": sockets(cores),
        "numa": numa_nodes(cores),
        "nics": nics(),
        "huge_pages": huge_pages(),
    }


def lines(places: list[dict]) -> list[str]:
    """Return the ranks' cores and NUMA nodes, and for each host its network cards and large pages.

    Ranks of a host with the same cores share a line, and so do identical hosts.
    """
    hosts: dict = {}
    for place in places:
        same = hosts.setdefault(place["host"], {})
        same.setdefault((tuple(place["cores"]), tuple(place["numa"])), []).append(place["rank"])
    found = []
    for host, ranks in hosts.items():
        found += [
            f"{host}: ranks {listed(own)} on cores {listed(cores)}"
            + (f", NUMA {listed(numa)}" if numa else "")
            for (cores, numa), own in ranks.items()
        ]
    by_text: dict = {}
    for place in {place["host"]: place for place in places}.values():
        cards = (
            ", ".join(
                card["name"]
                + (f" {card['gbit_per_s']:g} Gbit/s" * bool(card["gbit_per_s"]))
                + f" (NUMA {card['numa']})" * (card["numa"] >= 0)
                for card in place["nics"]
            )
            or "no network card that is up"
        )
        huge = place["huge_pages"]
        text = (
            f"{cards}; huge pages: transparent {huge['transparent']} (defrag {huge['defrag']}),"
            f" {huge['set_aside']} of {huge['page_KiB'] >> 10} MiB set aside"
        )
        by_text.setdefault(text, []).append(place["host"])
    return found + [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
