"""Two hosts on one machine: network namespaces with host names, joined by a cable of known rate.

Each host has a network namespace, a host name and one end, `eth0`, of a veth pair; `tc tbf` shapes
both ends. The second host's clock is AHEAD_SECONDS ahead, in a time namespace. mpiexec starts its
proxies through a script that enters the namespaces, as ssh would.
"""

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from functools import cache

from bench import two_sites
from bench.two_sites import ip
from mpipar.errors import EnvironmentProblem

PROGRAMS = ("ip", "tc", "unshare", "hostname")
MTU, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame, and of the TCP payload in it
AHEAD_SECONDS = 1000
ENTER = f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
own=(--uts)
[[ $host == hostb* ]] && own+=(--time --monotonic {AHEAD_SECONDS} --fork --kill-child)
exec ip netns exec "$host" unshare "${{own[@]}}" bash -c "hostname $host; exec $*"
"""
# Both hosts share the cores of this machine: a rank that considers all of them its own would start
# so many BLAS threads that they wait for each other.
OVER_TCP = two_sites.OVER_TCP | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}


@cache
def missing() -> str | None:
    """Return why namespaces are impossible here, or None. It creates one, and deletes it."""
    if os.geteuid():
        return "needs root"
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"not installed: {', '.join(lacking)}"
    name = f"trial{uuid.uuid4().hex[:6]}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except EnvironmentProblem as error:
        return str(error)
    return None


def wait_until_up(name):
    """Wait until the kernel reports that a cable's other end is up."""
    deadline = time.monotonic() + 10
    while "LOWER_UP" not in (text := ip("-n", name, "link", "show", "eth0")) or (
        "state UP" not in text
    ):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


class Hosts:
    """The names of the hosts, and a way to start ranks on them."""

    def __init__(self, names, enter):
        self.names, self.enter = names, enter

    def mpiexec(self, launcher, counts, *command):
        """Return the command of mpiexec on the first host, with counts[i] ranks on host i."""
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self.names, counts, strict=True))
        words = [
            launcher,
            "-localhost",
            "10.77.0.1",
            "-launcher-exec",
            self.enter,
            "-hosts",
            hosts,
            "-n",
            str(sum(counts)),
            *command,
        ]
        return [self.enter, self.names[0], *words]


@contextlib.contextmanager
def two_hosts(folder, mbit_per_second):
    """Yield two Hosts; afterwards nothing of them is left."""
    tag = uuid.uuid4().hex[:6]
    names = [f"hosta{tag}", f"hostb{tag}"]
    enter = folder / "enter"
    enter.write_text(ENTER)
    enter.chmod(0o755)
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            ip(
                "netns",
                "exec",
                name,
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                f"{mbit_per_second}mbit",
                "burst",
                "32kb",
                "latency",
                "50ms",
            )
        for name in names:
            wait_until_up(name)
        yield Hosts(names, str(enter))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
