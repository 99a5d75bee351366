"""Which GPU each rank has, which ones it sees, and what is wrong with how they were given out."""

from __future__ import annotations


def fact(xp, number: int) -> dict:
    """PCI addresses of GPU `number`, which this rank has, and of all that this process sees."""
    device = xp.cuda.Device
    seen = range(xp.cuda.runtime.getDeviceCount())
    return {"gpu": device(number).pci_bus_id, "gpus": [device(one).pci_bus_id for one in seen]}


def remarks(places) -> list[str]:
    """Return what slows messages between GPUs, or makes ranks take turns.

    places: facts with rank and host. Ranks without a GPU are left out.
    """
    found = []
    users: dict = {}
    for place in places:
        if "gpu" in place:
            users.setdefault(place["host"], {}).setdefault(place["gpu"], []).append(place)
    for host, by_gpu in users.items():
        for gpu, sharing in by_gpu.items():
            if len(sharing) > 1:
                ranks = ", ".join(str(place["rank"]) for place in sharing)
                found.append(f"{host}: ranks {ranks} share GPU {gpu}: times say little about a "
                             "machine with a GPU for each rank")
        hidden = [f"rank {place['rank']} sees {', '.join(place['gpus'])}"
                  for sharing in by_gpu.values() for place in sharing
                  if not by_gpu.keys() <= set(place["gpus"])]
        if hidden:
            found.append(f"{host}: GPUs are hidden from ranks that exchange messages with them "
                         f"({'; '.join(hidden)}), which rules out direct copies: let each rank see "
                         "all of its host (SLURM: --gpu-bind=none, and no --gpus-per-task)")
    return found
