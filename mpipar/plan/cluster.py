"""A cluster of accelerators as the planner knows it: its data sheet, and what was measured of it.

Each machine is a file of mpipar/plan/machines/, which names the source of its figures. `STACKS` has
what a software stack achieves on any machine. `docs/planning.md` says how these were found.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from mpipar.errors import DataError, UsageError, suggestion
from mpipar.files.bounded import problems_as, read_toml
from mpipar.files.text import brief
from mpipar.files.typed import built

MACHINES = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Link:
    """A level of links. joins: devices that it joins, 0 for any number.

    gbytes_s: what a ring of devices moves through each device in one direction. Groups across
    nodes add up the rates of their members in a node. latency_us: of a collective of the level.
    """

    joins: int
    gbytes_s: float
    latency_us: float


@dataclass(frozen=True)
class Cluster:
    """One kind of device, and how its copies are linked, the fastest level first.

    peak_tflops: by number format. product_*: a product of 16-bit numbers takes product_us +
    FLOPs / product_tflops + bytes / product_gbytes_s. attention_tflops: fused attention forward.
    fused_attention: whether software that does not say it keeps scores out of the memory.
    layer_us: what starting the operations of a block's forward adds. basis: what the figures rest
    on.
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
    fused_attention: bool
    layer_us: float
    links: tuple[Link, ...]

    def per_node(self) -> int:
        """Devices that the fastest links join."""
        return self.links[0].joins

    @property
    def dtype_16(self) -> str:
        """The number format of 16 bits that training takes: the one with the wider range."""
        return "bfloat16" if "bfloat16" in self.peak_tflops else "float16"

    def with_dtype(self, dtype: str) -> Cluster:
        """The rates of products in a number format of `peak_tflops`: as far from its peak."""
        share = self.peak_tflops[dtype] / self.peak_tflops[self.dtype_16]
        if share == 1:
            return self
        return replace(self, product_tflops=self.product_tflops * share,
                       attention_tflops=self.attention_tflops * share,
                       basis=f"{self.basis}; {dtype} in proportion to its peak")

    def with_network(self, gbits_per_device: float) -> Cluster:
        """The same devices behind a network of another rate."""
        inner, outer = self.links[0], self.links[-1]
        return replace(self, links=(inner, replace(outer, gbytes_s=gbits_per_device / 8)))


@dataclass(frozen=True)
class Stack:
    """What a software stack makes of a machine.

    products: share of the machine's rate of products. elementwise: how often activations cross the
    memory, over once for each operation. attention: share of the machine's rate of attention.
    These three are fitted. The others are what the stack does: fused: attention without scores in
    memory. *_bytes: of a parameter. overlap: whether gathers and sums run beside the products.
    number_bytes: of a number that is computed with.
    """

    products: float
    elementwise: float
    attention: float
    fused: bool
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 12
    wire_bytes: float = 2
    unit: float = 1.0
    selective: float = 1.0
    overlap: bool = False
    number_bytes: float = 2

    def with_states(self, weight: float, gradient: float, optimizer: float) -> Stack:
        """The same stack with other bytes of a parameter."""
        return replace(self, weight_bytes=weight, gradient_bytes=gradient,
                       optimizer_bytes=optimizer)

    def with_dtype(self, dtype: str) -> Stack:
        """The same stack with numbers of a format; those of 32 bits need no masters beside them."""
        if dtype != "float32":
            return self
        return replace(self.with_states(4, 4, 8), number_bytes=4, wire_bytes=4)


STACKS = {
    "megatron": Stack(1.1, 0.948, 1.12, fused=True, overlap=True),
    "megatron-unfused": Stack(0.938, 1.14, 1.03, fused=False),
    "zero-bubble": Stack(0.854, 0.735, 0.936, fused=False),
    "deepspeed": Stack(0.906, 1.05, 0.891, fused=False, gradient_bytes=2, unit=0.25),
    "fsdp": Stack(0.945, 2.4, 0.512, fused=True, weight_bytes=4, optimizer_bytes=8, overlap=True),
    "torchtitan": Stack(1.32, 1.03, 0.224, fused=True, weight_bytes=4, optimizer_bytes=8,
                        overlap=True, selective=0.6),
}


def machine_names() -> list[str]:
    """The machines that the package knows."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """The Cluster of a name or of a TOML file's path.

    Raises UsageError for a name that does not exist, DataError for a file that is none.
    """
    if name in machine_names():
        path = MACHINES / f"{name}.toml"
    elif name.endswith(".toml"):
        path = Path(name)
    else:
        names = machine_names()
        wrong = "does not end in .toml" if Path(name).exists() else "does not exist"
        raise UsageError(f"--machine {brief(name)} {wrong}{suggestion(name, names)}; use"
                         f" one of {', '.join(names)}, or a file that ends in .toml")
    values = read_toml(path, DataError)
    with problems_as(DataError, str(path)):
        cluster = built(Cluster, {"name": path.stem} | values, "the file")
        if not cluster.links:
            raise ValueError("links must name at least one level")
    if wrong := _problems(cluster):
        raise DataError([f"{path}: {one}" for one in wrong])
    return cluster


def _problems(cluster: Cluster) -> list[str]:
    """What no machine has: a rate of 0, a time below 0, no rate of numbers of 16 bits."""
    parts = {"": cluster} | {f"links[{place}].": link for place, link in enumerate(cluster.links)}
    numbers = [(start + one.name, getattr(part, one.name)) for start, part in parts.items()
               for one in fields(part)]
    numbers += [(f"peak_tflops.{name}", rate) for name, rate in cluster.peak_tflops.items()]
    wrong = [f"{name} is {value:g}, which cannot be" for name, value in numbers
             if type(value) in (int, float) and (
                 value < 0 or (value == 0 and not name.endswith(("_us", "joins"))))]
    if not cluster.peak_tflops.keys() & {"bfloat16", "float16"}:
        wrong.append("peak_tflops names neither bfloat16 nor float16")
    return wrong
