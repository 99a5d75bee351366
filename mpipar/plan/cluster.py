"""A cluster of accelerators as the planner sees it: its data sheet, and measurements of it.

Each machine is a file of mpipar/plan/machines/, which names the source of its figures. `STACKS` has
what a software stack achieves on any machine. docs/planning.md explains how these were found.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mpipar.errors import DataError, UsageError, suggestion
from mpipar.files.bounded import problems_as, read_toml
from mpipar.files.text import brief
from mpipar.files.typed import built
from mpipar.plan.machine_file import LARGEST, numbers

OLD_START = 3.5  # of collectives: two tables of A100, for different versions of NCCL
MACHINES = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Link:
    """A level of links. joins: devices that it joins; 0 for any number, in the last level.

    gbytes_s: what a ring of devices moves through each device in one direction. Groups across nodes
    add up the rates of their members in a node. latency_us: of a collective of the level.
    """

    joins: int
    gbytes_s: float
    latency_us: float


@dataclass(frozen=True)
class Cluster:
    """One kind of device, and the links between its copies, the fastest level first.

    peak_tflops: by number format. product_*: a product of 16-bit numbers takes product_us + FLOPs /
    product_tflops + bytes / product_gbytes_s. attention_tflops: fused attention forward.
    ceiling_tflops: the fastest product that was measured, or 0.9 of the peak; nothing computes
    faster. efficiency: the hardware generation whose constants of a Stack apply. fused_attention:
    whether software that does not state it avoids storing scores. basis: where the figures come
    from.
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

    def per_node(self) -> int:
        """Return how many devices the fastest links join."""
        return self.links[0].joins

    @property
    def dtype_16(self) -> str:
        """The 16-bit number format used for training: the one with the wider range."""
        return "bfloat16" if "bfloat16" in self.peak_tflops else "float16"

    def with_dtype(self, dtype: str) -> Cluster:
        """Return the devices with product rates of another format, scaled in proportion to its
        peak.
        """
        share = self.peak_tflops[dtype] / self.peak_tflops[self.dtype_16]
        if share == 1:
            return self
        return replace(
            self,
            product_tflops=self.product_tflops * share,
            attention_tflops=self.attention_tflops * share,
            ceiling_tflops=self.ceiling_tflops * share,
            basis=f"{self.basis}; {dtype} in proportion to its peak",
        )

    def with_old_collectives(self) -> Cluster:
        """Return the same devices with libraries before 2023, which have only the later start."""
        return replace(
            self,
            links=tuple(
                replace(link, latency_us=OLD_START * link.latency_us) for link in self.links
            ),
        )

    def with_links(self, inner: float = 1.0, outer: float = 1.0) -> Cluster:
        """Return the same devices with links that many times as fast, within and between nodes."""
        first, *others = self.links
        return replace(
            self,
            links=(
                replace(first, gbytes_s=first.gbytes_s * inner),
                *(replace(link, gbytes_s=link.gbytes_s * outer) for link in others),
            ),
        )

    def with_network(self, gbits_per_device: float) -> Cluster:
        """Return the same devices with a network of another rate."""
        inner, outer = self.links[0], self.links[-1]
        return replace(self, links=(inner, replace(outer, gbytes_s=gbits_per_device / 8)))


class Constants(NamedTuple):
    """What a software stack achieves on a machine: four constants, which are fitted.

    products: share of the machine's rate of products. elementwise: how often activations cross
    memory, over once for each operation. attention: share of the machine's rate of attention.
    starts_us: what the processor takes to launch the operations of a block's forward.
    """

    products: float
    elementwise: float
    attention: float
    starts_us: float


@dataclass(frozen=True)
class Stack:
    """A software stack.

    sets: (generation, constants) of machines. fused: attention without scores in memory. *_bytes:
    of a parameter. overlap: whether gathers and sums overlap with the products. unit: blocks that
    are gathered at once. arrays: of a block, that are gathered and summed one by one, each with a
    copy of every rank's piece; 0 where one operation moves all. every_other:
    selective recompute repeats every other product, and what lies between them. remakes: backward
    recomputes whatever its layers can, as mpipar does. norm_bytes: of a number that a norm keeps, 0
    if as wide as the others. logit_bytes: per logit, besides the number itself: in 32 bits the
    logit, the logarithm of its softmax, and its gradient; a fused loss has one. mpipar's own layers
    declare what they keep of it. number_bytes: of a number that is computed with. pads: whether
    the vocabulary is padded to a size that suits tensor cores. evidence: the measured steps it is
    based on.
    """

    sets: tuple[tuple[str, Constants], ...]
    evidence: str
    fused: bool = True
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    wire_bytes: float = 2
    unit: float = 1.0
    arrays: int = 0
    overlap: bool = True
    every_other: bool = False
    remakes: bool = False
    norm_bytes: float = 0
    logit_bytes: float = 12
    number_bytes: float = 2
    pads: bool = True

    def on(self, cluster: Cluster) -> Constants:
        """Return the constants on a machine, those of the first generation if it has none."""
        return dict(self.sets).get(cluster.efficiency, self.sets[0][1])

    def with_states(self, weight: float, gradient: float, optimizer: float) -> Stack:
        """Return the same stack with other bytes of a parameter."""
        return replace(
            self, weight_bytes=weight, gradient_bytes=gradient, optimizer_bytes=optimizer
        )

    def with_dtype(self, dtype: str) -> Stack:
        """Return the same stack in another number format; 32-bit weights need no masters."""
        if dtype != "float32":
            return self
        return replace(self.with_states(4, 4, 8), number_bytes=4, wire_bytes=4)

    def with_starts(self, by: float) -> Stack:
        """Return the same stack, which launches `by` times as many operations a second."""
        return replace(
            self,
            sets=tuple(
                (name, one._replace(starts_us=one.starts_us / by)) for name, one in self.sets
            ),
        )

    def unfused(self) -> Stack:
        """Return the same stack as it was before 2023: scores in memory, and no overlap."""
        return replace(self, fused=False, overlap=False)


MEGATRON = (
    ("a100", Constants(0.946, 1.71, 1.04, 808.0)),
    ("h100", Constants(1.04, 1.03, 0.958, 300.0)),
)
FSDP = (
    ("a100", Constants(0.882, 2.22, 0.527, 300.0)),
    ("h100", Constants(0.842, 2.96, 0.495, 300.0)),
)
GENERATIONS = tuple(name for name, _ in MEGATRON)  # of machines, for `efficiency`
STACKS = {
    "mpipar": Stack(
        MEGATRON,
        "none of its steps is measured on a GPU: it is given Megatron-LM's"
        " constants, and keeps in memory what its own layers say",
        remakes=True,
    ),
    "megatron": Stack(
        MEGATRON, "170 published steps of Megatron-LM and its relatives, and 730 on one node"
    ),
    "fsdp": Stack(
        FSDP,
        "108 published steps of PyTorch FSDP",
        weight_bytes=4,
        optimizer_bytes=8,
        every_other=True,
        logit_bytes=4,
    ),
}


def machine_names() -> list[str]:
    """Return the machines that the package knows."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


def like(name: str, names: list[str]) -> list[str]:
    """Return the names that begin like another one, ignoring case; all if there are none."""
    return [one for one in names if one.startswith(name.lower())] or names


def load_cluster(name: str) -> Cluster:
    """Return the Cluster of a name, or of a TOML file's path.

    Raises UsageError for an unknown name, DataError for a file that is no data sheet.
    """
    if name in machine_names():
        path = MACHINES / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        names = machine_names()
        wrong = "does not end in .toml" if os.path.exists(name) else "does not exist"
        if name.endswith(".json"):
            wrong = "is no data sheet; files of bench.calibrate are for explain and train"
        close = suggestion(name.lower(), like(name, names))
        raise UsageError(
            f"--machine {brief(name)} {wrong}{close}; use one of"
            f" {', '.join(names)}, or a file that ends in .toml"
        )
    values = read_toml(path, DataError)
    with problems_as(DataError, str(path)):
        cluster = built(Cluster, {"name": path.stem} | values, "the file")
        if not cluster.links:
            raise ValueError("links must name at least one level")
    if wrong := _problems(cluster):
        raise DataError([f"{path}: {one}" for one in wrong])
    return cluster


def _problems(cluster: Cluster) -> list[str]:
    """List what no machine has, as a rate of 0 or a time below 0, and what plans do not know."""
    wrong = [
        f"{place} is {value:g}, which cannot be"
        for place, value in numbers(asdict(cluster))
        if not 0 <= value <= LARGEST or (value == 0 and not place.endswith(("_us", "joins")))
    ]
    if cluster.links[0].joins < 1:
        wrong.append("the first of links joins 0 devices; say how many a node has")
    if cluster.ceiling_tflops > max(cluster.peak_tflops.values(), default=0.0):
        wrong.append(f"ceiling_tflops is {cluster.ceiling_tflops:g}, above the peak")
    if len(cluster.links) > 2:
        wrong.append(
            f"links has {len(cluster.links)} levels; leave those out between the fastest"
            " one and the network"
        )
    if cluster.efficiency not in GENERATIONS:
        wrong.append(
            f"efficiency {brief(cluster.efficiency)}: no software is measured on it; use"
            f" {' or '.join(GENERATIONS)}, whichever is more similar"
        )
    if not cluster.peak_tflops.keys() & {"bfloat16", "float16"}:
        wrong.append("peak_tflops names neither bfloat16 nor float16")
    return wrong
