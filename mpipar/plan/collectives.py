"""How long messages and collectives take on a cluster's links: latency and bytes over a rate.

A group of q ranks whose neighbours lie `stride` ranks apart has g members in each node. Inside a
node a ring moves its bytes over the fastest links. Across nodes a group that fills its nodes drives
all their adapters. One that shares them with other groups gets fewer than g. Source of the volumes:
rings (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math

from mpipar.plan.cluster import Cluster

SHARED = 0.435  # a group of g of a node's devices drives g**SHARED adapters, if not all
NETWORK = 0.91  # share of an adapter's rate that collectives reach


def all_reduce(cluster: Cluster, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of a sum of `nbytes` on each of `ranks` ranks that are `stride` ranks apart."""
    return _collective(cluster, 2 * nbytes, ranks, stride)


def all_gather(cluster: Cluster, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of an all-gather or a reduce-scatter of `nbytes` in all."""
    return _collective(cluster, nbytes, ranks, stride)


def exchange(cluster: Cluster, nbytes: float, stride: int) -> float:
    """Seconds of a message to the rank that is `stride` ranks further."""
    link = cluster.links[0] if stride < cluster.per_node() else cluster.links[-1]
    share = 1.0 if stride < cluster.per_node() else NETWORK
    return link.latency_us * 1e-6 / 2 + nbytes / (link.gbytes_s * 1e9 * share)


def _collective(cluster: Cluster, nbytes: float, ranks: int, stride: int) -> float:
    if ranks == 1:
        return 0.0
    inner, outer = cluster.links[0], cluster.links[-1]
    moved = (ranks - 1) / ranks * nbytes
    if ranks * stride <= inner.joins or inner is outer:
        return inner.latency_us * 1e-6 + moved / (inner.gbytes_s * 1e9)
    members = max(1, min(ranks, inner.joins // stride))
    adapters = members if members == inner.joins else members**SHARED
    rate = min(inner.gbytes_s, adapters * outer.gbytes_s * NETWORK) * 1e9
    return (inner.latency_us * (members > 1) + outer.latency_us * math.log2(
        max(2, ranks / members))) * 1e-6 + moved / rate
