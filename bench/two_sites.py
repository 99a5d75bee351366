"""Training across a slow link: data parallelism, and islands that meet once in many steps.

    python -m bench.two_sites [--steps N] [--json FILE]      # as root, on Linux

Two network namespaces stand for two sites, with one rank each. This process is the link between
them: it passes frames on at 25 Mbit/s, each 10 ms after it came, so that an answer takes 20 ms, and
counts their bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from pathlib import Path

from bench.program import Outcome, Program
from mpipar.errors import EnvironmentProblem

RATE, DELAY_SECONDS = 25e6, 0.010  # bits per second each way; one way
TUNSETIFF, TAP_WITHOUT_HEADER, MOST_BYTES = 0x400454CA, 0x1002, 1 << 16
QUEUE_BYTES = 1 << 18  # waiting frames; later ones are lost
MODEL = "--layers 2 --seq-len 64 --batch-size 16 --num-microbatches 1 --layout dp=2,pp=1,tp=1"
RUN = "--warmup-steps 20 --lr-schedule constant --sample-tokens 0 --trace none --check-replicas 0"
WAYS = {
    "dp": "",
    "islands, H 1": "--islands 2 --outer-interval 1",
    "islands, H 10": "--islands 2 --outer-interval 10",
    "islands, H 50": "--islands 2 --outer-interval 50",
}
ENTER = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts bash -c "hostname $host; exec $*"
"""
OVER_TCP = {  # shared memory would bypass the link
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
    "MPIR_CVAR_NOLOCAL": "1",
    "HYDRA_LAUNCHER": "ssh",
    "OMP_NUM_THREADS": "1",
}


def ip(*words: str) -> str:
    """Return what `ip` with these words prints.

    Raises EnvironmentProblem if it fails: most containers forbid namespaces even to root.
    """
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblem(
            f"ip {' '.join(words)}: {done.stderr.strip()}; a container must be started with"
            " --privileged"
        )
    return done.stdout


class Link:
    """A thread that passes frames between two devices. sent: bytes so far, both ways together."""

    def __init__(self, devices: list[int]):
        self.devices, self.sent, self.open = devices, 0, True
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        ways = {a: (b, deque()) for a, b in zip(self.devices, self.devices[::-1], strict=True)}
        free = dict.fromkeys(self.devices, 0.0)  # when the last frame has left
        while self.open:
            due = min((queue[0][0] for _, queue in ways.values() if queue), default=None)
            wait = 0.1 if due is None else max(0.0, due - time.monotonic())
            for device in select.select(self.devices, [], [], wait)[0]:
                frame, now = os.read(device, MOST_BYTES), time.monotonic()
                queue = ways[device][1]
                if (free[device] - now) * RATE / 8 < QUEUE_BYTES:
                    free[device] = max(free[device], now) + len(frame) * 8 / RATE
                    queue.append((free[device] + DELAY_SECONDS, frame))
            for other, queue in ways.values():
                while queue and queue[0][0] <= time.monotonic():
                    _, frame = queue.popleft()
                    os.write(other, frame)
                    self.sent += len(frame)

    def close(self) -> None:
        self.open = False
        self.thread.join()


@contextlib.contextmanager
def two_sites(folder: Path):
    """Yield (names of two sites, the script that enters one, the Link); they are removed again."""
    if lacking := [name for name in ("ip", "unshare", "hostname") if not shutil.which(name)]:
        raise EnvironmentProblem(f"not installed: {', '.join(lacking)}")
    if os.geteuid() or not os.path.exists("/dev/net/tun"):
        raise EnvironmentProblem("needs root, and /dev/net/tun")
    tag = uuid.uuid4().hex[:6]
    names, enter = [f"site{letter}{tag}" for letter in "ab"], folder / "enter"
    enter.write_text(ENTER)
    enter.chmod(0o755)
    with contextlib.ExitStack() as stack:
        devices = []
        for number, name in enumerate(names, 1):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, device)
            request = struct.pack("16sH22x", name[:15].encode(), TAP_WITHOUT_HEADER)
            fcntl.ioctl(device, TUNSETIFF, request)
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("link", "set", name[:15], "netns", name, "name", "eth0")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for up in ("lo", "eth0"):
                ip("-n", name, "link", "set", up, "up")
            devices.append(device)
        link = Link(devices)
        stack.callback(link.close)
        yield names, enter, link


def trained(folder: Path, sites: list[str], enter: Path, flags: str) -> tuple[float, float]:
    """Train with these flags; return (seconds of a step, held-out loss).

    Others may use this machine, so the fastest tenth of steps without and with a meeting count.
    """
    words = [
        *(str(enter), sites[0], shutil.which("mpiexec", path=str(Path(sys.executable).parent))),
        *("-localhost", "10.77.0.1", "-launcher-exec", str(enter), "-hosts", ",".join(sites)),
        *("-n", "2", sys.executable, "-m", "mpipar", "train", "--out", str(folder)),
        *(*MODEL.split(), *RUN.split(), *flags.split()),
    ]
    environment = os.environ | OVER_TCP | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise EnvironmentProblem(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds: dict[bool, list[float]] = {}
    for line in lines[1:]:
        kinds.setdefault("island" in line["comm"], []).append(line["step_seconds"])
    undisturbed = ((len(own), sorted(own)[: -(-len(own) // 10)]) for own in kinds.values())
    seconds = sum(count * sum(few) / len(few) for count, few in undisturbed) / (len(lines) - 1)
    result = json.loads((folder / "result.json").read_text())
    return seconds, result["held_out_loss"]


def measure(args, session) -> Outcome:
    """Train in each way, with the same rows."""
    rows = []
    with tempfile.TemporaryDirectory() as text, two_sites(Path(text)) as (sites, enter, link):
        for number, (way, flags) in enumerate(WAYS.items()):
            before = link.sent
            folder = Path(text) / str(number)
            seconds, loss = trained(folder, sites, enter, f"--steps {args.steps} {flags}")
            rows.append(
                {
                    "way": way,
                    "step_ms": round(seconds * 1e3),
                    "link_MiB_per_step": (link.sent - before) / 2**20 / args.steps,
                    "held_out_loss": loss,
                }
            )
    return Outcome(rows, {"steps": args.steps, "Mbit_per_s": RATE / 1e6, "round_trip_ms": 20})


main = Program(
    "two_sites", __doc__, measure, counts={"--steps": (200, "steps of each run")}
).started(__name__)
