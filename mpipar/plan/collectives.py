"""The time of messages and collectives on a cluster's links: latency, and bytes over a rate.

A group of q ranks whose neighbours are `stride` ranks apart has some members in each node. Inside a
node a ring moves its bytes over the fastest links. Across nodes each member in a node drives its
own adapter, and the node with the fewest members sets the pace. Source of the volumes: rings
(Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math

from mpipar.plan.cluster import Cluster, Link

SHORT, LATE = 0.66, 3.5  # of a node's links: rate of the low-latency way, latency of the other
STEP_US = (3.4, 14.0)  # of a ring, in a node and to the next one: NCCL's own table (tuning.cc)
NETWORK = 0.9  # share of an adapter's rate that collectives reach


def all_reduce(cluster: Cluster, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of a sum of `nbytes` on each of `ranks` ranks, `stride` ranks apart."""
    return collective(cluster, 2 * nbytes, ranks, stride, ring=False)


def all_gather(cluster: Cluster, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all."""
    return collective(cluster, nbytes, ranks, stride, ring=True)


def collective(cluster: Cluster, nbytes: float, ranks: int, stride: int, ring: bool) -> float:
    """Return the seconds in which each rank sends (ranks - 1) / ranks of `nbytes`.

    ring: whether pieces take a step for every rank, as those of gathers do; libraries sum across
    nodes along trees, whose depth grows with the logarithm of the nodes.
    """
    if ranks == 1:
        return 0.0
    inner, outer = cluster.links[0], cluster.links[-1]
    moved = (ranks - 1) / ranks * nbytes
    members = ranks if inner is outer else members_in_a_node(ranks, stride, inner.joins)
    if members == ranks:
        return in_a_node(inner, moved)
    nodes, start_us = ranks / members, inner.latency_us * (members > 1)
    if ring:
        start_us += outer.latency_us + (ranks - nodes) * STEP_US[0] + nodes * STEP_US[1]
    else:
        start_us += outer.latency_us * math.log2(max(2, nodes))
    across = start_us * 1e-6 + moved / (members * outer.gbytes_s * NETWORK * 1e9)
    return max(across, in_a_node(inner, moved)) if members > 1 else across


def all_to_all(cluster: Cluster, nbytes: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds in which each rank sends a part of its `nbytes` to each other rank.

    What goes to other nodes leaves through a rank's own adapter, while the rest stays in the node.
    """
    if ranks == 1:
        return 0.0
    inner, outer = cluster.links[0], cluster.links[-1]
    members = ranks if inner is outer else members_in_a_node(ranks, stride, inner.joins)
    inside = in_a_node(inner, (members - 1) / ranks * nbytes) if members > 1 else 0.0
    if members == ranks:
        return inside
    across = (ranks - members) / ranks * nbytes / (NETWORK * outer.gbytes_s * 1e9)
    return max(inside, outer.latency_us * 1e-6 + across)


def exchange(cluster: Cluster, nbytes: float, stride: int) -> float:
    """Return the seconds of a message to the rank that is `stride` ranks further."""
    link = cluster.links[0] if stride < cluster.per_node() else cluster.links[-1]
    share = 1.0 if stride < cluster.per_node() else NETWORK
    return link.latency_us * 1e-6 / 2 + nbytes / (link.gbytes_s * 1e9 * share)


def members_in_a_node(ranks: int, stride: int, per_node: int) -> int:
    """Return a group's fewest members in a node that it touches; `ranks` if it stays in one.

    Groups are contiguous, so that those of 6 ranks on nodes of 8 are 6, 2 + 4, 4 + 2, 6.
    """
    span = ranks * stride
    if per_node % span == 0:
        return ranks
    if stride % per_node == 0:
        return 1
    if per_node % stride == 0 and span % per_node == 0:
        return per_node // stride
    fewest = ranks
    for group in range(per_node // math.gcd(span, per_node)):
        for first in range(group * span % per_node, group * span % per_node + stride):
            last = first + (ranks - 1) * stride
            if first // per_node != last // per_node:
                begins = math.ceil((per_node - first % per_node) / stride)
                fewest = min(
                    fewest, begins, last % per_node // stride + 1, max(1, per_node // stride)
                )
    return fewest


def in_a_node(link: Link, moved: float) -> float:
    """Return the seconds of a collective over a node's links: the faster of a library's two ways.

    One has a low latency, and reaches a share of the rate. The other reaches all of it, but starts
    later.
    """
    rate, start = link.gbytes_s * 1e9, link.latency_us * 1e-6
    return min(start + moved / (SHORT * rate), LATE * start + moved / rate)
