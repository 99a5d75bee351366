"""The bound of bus bandwidth (busbw): a link rate that the user states, or that of a memory copy.

The rate is that of one rank's link, one way. A stated rate belongs to the slowest kind of link in
the job: the link between hosts, if there are several. Inside a host MPI copies memory. So the copy
rate measured at the start is shown there, for orientation. A message that is copied twice stays
below half of it; one that stays in the cache may exceed it.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.interconnect.groups import LINKS
from bench.interconnect.paired import Bidirectional

STATED, COPY = "--bound-GBps", "memory copy"


class Bounds(NamedTuple):
    """stated_GBps: None where the user says nothing. copy_GBps: the rate of a memory copy."""

    stated_GBps: float | None
    copy_GBps: float
    transport: str
    several_hosts: bool

    def of(self, between_hosts: bool) -> tuple[str, float] | None:
        """(name of the bound, GB/s one way), or None where nothing is known."""
        if self.stated_GBps is not None and between_hosts == self.several_hosts:
            return STATED, self.stated_GBps
        if self.transport == "mpi-host" and not between_hosts:
            return COPY, self.copy_GBps
        return None

    def columns(self, row: dict) -> dict:
        """bound, bound_GBps and bound_percent of a row; {} without a bound and for barriers."""
        bound = self.of(row["link"] == LINKS[2])
        if bound is None or not row["busbw_GBps"]:
            return {}
        rate = bound[1] * (2 if row["case"] == Bidirectional.name else 1)  # it counts both ways
        return {"bound": bound[0], "bound_GBps": rate,
                "bound_percent": 100 * row["busbw_GBps"] / rate}

    def describe(self) -> str:
        """The bounds of this job in one line."""
        parts = []
        for between_hosts in (False, True)[:1 + self.several_hosts]:
            bound = self.of(between_hosts)
            rate = f"{bound[1]:.4g} GB/s ({bound[0]})" if bound else "unknown"
            parts.append(f"{rate} {'between hosts' if between_hosts else 'inside a host'}")
        return ", ".join(parts)
