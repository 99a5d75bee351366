"""A machine as a data sheet: one kind of device, and its links level by level.

Each file of machines/ is one; `python -m bench calibrate` writes one of the machine at hand. A
level of links joins so many devices: a node, an island, a site. docs/planning.md explains how the
figures were found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mpipar.config.text import brief
from mpipar.errors import DataError, UsageError, broken, suggestion
from mpipar.run.files.bounded import built, problems_as, read_toml

SHEETS = Path(__file__).parent / "machines"
GENERATIONS = ("a100", "h100")  # whose constants of a software stack apply
LARGEST = 1e12  # of any figure
SHORT, LATE = 0.66, 3.5  # of a node's links: rate of the low-latency way, latency of the other
STEP_US = (3.4, 14.0)  # of a ring, in a node and to the next one: NCCL's own table (tuning.cc)
NETWORK = 0.9  # share of an adapter's rate that collectives reach


@dataclass(frozen=True)
class Link:
    """A level of links. joins: devices that it joins; 0 for any number, in the last of several.

    gbytes_s: what a ring of devices moves through each device in one direction. A group across the
    level's units adds up the rates of its members in a unit. latency_us: of a collective.
    """

    joins: int
    gbytes_s: float
    latency_us: float


@dataclass(frozen=True)
class Machine:
    """One kind of device, and the links between its copies, the fastest level first.

    peak_tflops: by number format. product_*: a matmul of 16-bit numbers takes product_us + FLOPs /
    product_tflops + bytes / product_gbytes_s. attention_tflops: fused attention forward.
    ceiling_tflops: the fastest matmul that was measured, or 0.9 of the peak. best_mfu: percent of
    the peak that the best published training step reaches (`Shape.step_flops`); 0 where none is
    known. efficiency: the generation whose constants of a stack apply. fused_attention: whether
    software that does not state it avoids storing scores. basis: where the figures come from.
    device: what mpipar calls it, cuda or cpu.
    """

    name: str
    basis: str
    memory_gib: float
    hbm_gbytes_s: float
    peak_tflops: dict[str, float]
    product_us: float
    product_tflops: float
    product_gbytes_s: float
    attention_tflops: float
    ceiling_tflops: float
    efficiency: str
    fused_attention: bool
    links: tuple[Link, ...]
    best_mfu: float = 0.0
    device: str = "cuda"

    @property
    def per_node(self) -> int:
        """How many devices the fastest links join."""
        return self.links[0].joins

    @property
    def dtype_16(self) -> str:
        """The 16-bit number format used for training: the one with the wider range."""
        return "bfloat16" if "bfloat16" in self.peak_tflops else "float16"

    @property
    def dtype(self) -> str:
        """The number format that is planned with: processors compute in 32 bits at least."""
        return "float32" if self.device == "cpu" else self.dtype_16

    def with_dtype(self, dtype: str) -> Machine:
        """Return the machine with matmuls of another format, in proportion to its peak."""
        share = self.peak_tflops[dtype] / self.peak_tflops[self.dtype_16]
        return replace(
            self,
            product_tflops=self.product_tflops * share,
            attention_tflops=self.attention_tflops * share,
            ceiling_tflops=self.ceiling_tflops * share,
        )

    def with_links(self, inner: float, outer: float) -> Machine:
        """Return the machine with links that many times as fast, inside nodes and between them."""
        rates = (inner, *[outer] * (len(self.links) - 1))
        pairs = zip(self.links, rates, strict=True)
        return replace(
            self, links=tuple(replace(x, gbytes_s=x.gbytes_s * rate) for x, rate in pairs)
        )

    # --- collectives: latency, and bytes over a rate. Volumes of rings: Patarasuk and Yuan 2009.

    def collective(self, nbytes: float, ranks: int, stride: int = 1, ring: bool = False) -> float:
        """Return the seconds in which each rank sends (ranks - 1) / ranks of `nbytes`.

        stride: how many ranks apart neighbours of the group are. ring: whether pieces take a step
        for every rank, as those of gathers do; libraries sum across nodes along trees.
        """
        moved, start_us, seconds = (ranks - 1) / ranks * nbytes, 0.0, 0.0
        for link, inside, members in self.crossed(ranks, stride):
            start_us += link.latency_us
            if link is self.links[0]:
                seconds = in_a_node(link, moved)
                continue
            units = members / inside
            if ring:
                steps_us = (members - units) * STEP_US[0] + units * STEP_US[1]
            else:
                steps_us = link.latency_us * (math.log2(max(2.0, units)) - 1)
            across = moved / (inside * link.gbytes_s * NETWORK * 1e9)
            seconds = max(seconds, (start_us + steps_us) * 1e-6 + across)
        return seconds

    def crossed(self, ranks: int, stride: int) -> Iterator[tuple[Link, int, int]]:
        """Yield (level, members in a unit of the level below, in one of its own) of a group.

        Levels that nothing crosses are left out.
        """
        inside = 1
        for link in self.links:
            below = link is not self.links[-1]
            members = fewest_members(ranks, stride, link.joins) if below else ranks
            if members > inside:
                yield link, inside, members
                inside = members

    def all_reduce(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a sum of `nbytes` on each of `ranks` ranks."""
        return self.collective(2 * nbytes, ranks, stride)

    def all_gather(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all."""
        return self.collective(nbytes, ranks, stride, ring=True)

    def all_to_all(self, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds in which each rank sends a part of its `nbytes` to each other rank.

        What goes to other units leaves through a rank's own adapter.
        """
        seconds = 0.0
        for link, inside, members in self.crossed(ranks, stride):
            share = (members - inside) / ranks * nbytes
            if link is self.links[0]:
                seconds = in_a_node(link, share)
            else:
                sending = share / (link.gbytes_s * NETWORK * 1e9)
                seconds = max(seconds, link.latency_us * 1e-6 + sending)
        return seconds

    def message(self, nbytes: float, stride: int) -> float:
        """Return the seconds of a message to the rank that is `stride` ranks further."""
        level = next((one for one in self.links if stride < one.joins), self.links[-1])
        rate = level.gbytes_s * 1e9 * (1.0 if level is self.links[0] else NETWORK)
        return level.latency_us * 1e-6 / 2 + nbytes / rate


def fewest_members(ranks: int, stride: int, unit: int) -> int:
    """Return a group's fewest members in a unit of so many devices that it touches.

    Groups are contiguous, so that those of 6 ranks on nodes of 8 are 6, 2 + 4, 4 + 2, 6.
    """
    span = ranks * stride
    return ranks if unit % span == 0 else max(1, math.gcd(span, unit) // stride)


def in_a_node(link: Link, moved: float) -> float:
    """Return the seconds of a collective over a node's links: the faster of a library's two ways.

    One has a low latency, and reaches a share of the rate. The other reaches all of it, but starts
    later.
    """
    rate, start = link.gbytes_s * 1e9, link.latency_us * 1e-6
    return min(start + moved / (SHORT * rate), LATE * start + moved / rate)


def machine_names() -> list[str]:
    """Return the machines that the package knows."""
    return sorted(path.stem for path in SHEETS.glob("*.toml"))


def load_machine(name: str, ranks: int = 1) -> Machine:
    """Return the Machine of a name, or of a TOML file's path, for a job of so many ranks.

    Raises UsageError for an unknown name, DataError for a file that is no data sheet, or whose
    links do not join so many.
    """
    names = machine_names()
    path = SHEETS / f"{name}.toml" if name in names else Path(name)
    if path.suffix != ".toml":
        raise UsageError(
            f"--machine {brief(name)}: is no machine{suggestion(name.lower(), names)}; use one of"
            f" {', '.join(names)}, or a file that ends in .toml"
        )
    values = read_toml(path, DataError)
    with problems_as(DataError, str(path)):
        machine = built(Machine, {"name": path.stem} | values, "the file")
    if wrong := sheet_problems(machine, ranks):
        raise DataError([f"{path}: {one}" for one in wrong])
    return machine


def sheet_problems(machine: Machine, ranks: int) -> list[str]:
    """Return what no machine has, and what plans would misread."""
    figures = vars(machine) | machine.peak_tflops
    for number, link in enumerate(machine.links):
        figures |= {f"links[{number}].{name}": value for name, value in vars(link).items()}
    joins, devices = [link.joins for link in machine.links] or [0], ("cuda", "cpu")
    uneven = any(two % one for one, two in pairwise(joins) if one)
    return broken(
        *(
            (
                not 0 <= value <= LARGEST
                or (value == 0 and not place.endswith(("_us", "joins", "best_mfu"))),
                f"{place} is {value:g}, which cannot be",
            )
            for place, value in figures.items()
            if type(value) in (int, float)
        ),
        (
            uneven or 0 in (joins[0], *joins[:-1]),
            (
                f"links join {', '.join(map(str, joins))} devices: each level must join a multiple"
                " of the one before; only the last of several may be 0, which is any number"
            ),
        ),
        (
            0 < joins[-1] < ranks,
            f"links join {joins[-1]} devices, the job has {ranks}: add a level that joins more",
        ),
        (
            machine.ceiling_tflops > max(machine.peak_tflops.values(), default=0.0),
            f"ceiling_tflops is {machine.ceiling_tflops:g}, above the peak",
        ),
        (
            machine.efficiency not in GENERATIONS,
            (
                f"efficiency {brief(machine.efficiency)}: no software is measured on it;"
                f" use {' or '.join(GENERATIONS)}, whichever is more similar"
            ),
        ),
        (
            not machine.peak_tflops.keys() & {"bfloat16", "float16"},
            "peak_tflops names neither bfloat16 nor float16",
        ),
        (
            machine.device not in devices,
            f"device {brief(machine.device)}: use {' or '.join(devices)}",
        ),
    )
