"""GPU assignment: which GPU each rank uses, which ones it sees, and what is wrong with that."""

from __future__ import annotations


def fact(xp, number: int) -> dict:
    """Return PCI addresses: of GPU `number`, which this rank uses, and of all GPUs it sees."""
    device = xp.cuda.Device
    seen = range(xp.cuda.runtime.getDeviceCount())
    return {"gpu": device(number).pci_bus_id, "gpus": [device(one).pci_bus_id for one in seen]}


def remarks(places) -> list[str]:
    """Return remarks on what slows down messages between GPUs or makes ranks take turns.

    places: facts with rank and host. Ranks without a GPU are skipped.
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
                found.append(
                    f"{host}: ranks {ranks} share GPU {gpu}: times say little about a "
                    "machine with one GPU per rank"
                )
        hidden = [
            f"rank {place['rank']} sees {', '.join(place['gpus'])}"
            for sharing in by_gpu.values()
            for place in sharing
            if not by_gpu.keys() <= set(place["gpus"])
        ]
        if hidden:
            found.append(
                f"{host}: ranks cannot see all the GPUs that they exchange messages with "
                f"({'; '.join(hidden)}), which rules out direct copies: let each rank see "
                "all GPUs of its host (SLURM: --gpu-bind=none, and no --gpus-per-task)"
            )
    return found
