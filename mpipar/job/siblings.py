"""The other ranks of this host, seen as processes: a rank that a signal kills cannot say so itself.

Its launcher soon kills the others. Whoever is first to see the end has a moment to tell it.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence

from mpipar.job.environment import started


def watch_ends(processes: Mapping[int, Sequence[int]], ended: Callable[[int], None]) -> None:
    """Call ended(rank), in a thread, for the first of these processes that ends.

    processes: see `host_processes`. A system without pidfd_open (Linux 5.3) sees nothing, nor does
    a rank whose processes have other numbers, in another container.
    """
    poll, ranks = select.poll(), {}
    for rank, (pid, start, *_) in processes.items():
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            if started(pid) == start:
                poll.register(descriptor, select.POLLIN)
                ranks[descriptor] = rank
    if ranks:
        threading.Thread(target=lambda: ended(ranks[poll.poll()[0][0]]), name="siblings",
                         daemon=True).start()
