"""A real SLURM cluster of several nodes on this host: munged, slurmctld, one slurmd for each node.

Everything (configuration, keys, sockets, logs, state) lies in one temporary folder. Allocation,
environment, exit codes and signals are real; timing is not.
"""

import contextlib
import dataclasses
import getpass
import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from helpers import kill_with, processes_with

START_LIMIT = 60.0  # seconds for all nodes to become idle
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scancel", "scontrol", "sinfo")
# SLURM's PMI2 server takes the part of a request that has arrived for all of it. If a long request
# of MPI_Init comes in two parts, the job hangs or is ended, whatever it was to run.
CUT_REQUEST = "mpi/pmi2: invalid client request"
MOST_STARTS = 3
FINAL_STATES = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY TIMEOUT".split()
)


def find_program(name: str) -> str | None:
    """Return the path of a program; daemons lie in sbin, which a user's PATH often lacks."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")


def missing_programs() -> list[str]:
    """Return the names of the programs that a cluster needs and this host lacks."""
    return [name for name in DAEMONS + CLIENTS if find_program(name) is None]


@dataclasses.dataclass(frozen=True)
class JobResult:
    """How a batch job ended: SLURM's state, the script's exit code, its output."""

    state: str
    exit_code: int
    output: str


class SlurmCluster:
    """Handle of a running cluster: runs SLURM's commands against it."""

    def __init__(self, folder: Path, nodes: tuple[str, ...]) -> None:
        self.folder = folder
        self.nodes = nodes
        self.config = folder / "slurm.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a clean environment whose SLURM commands talk to this cluster."""
        # Variables of an outer job or launcher would describe another job to the ranks.
        foreign = ("SLURM", "SBATCH", "PMI", "PMIX", "OMPI", "PRTE", "HYDRA", "MPI_LOCAL")
        env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        return env | {"SLURM_CONF": str(self.config)} | dict(extra or {})

    def run(
        self,
        *argv: str,
        timeout: float = 60.0,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command (srun, sinfo, ...) against this cluster, at most ``timeout`` seconds."""
        return subprocess.run(
            argv,
            env=self.environment(env),
            cwd=cwd,
            timeout=timeout,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )

    def submit(self, *argv: str, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """Submit a batch job with sbatch's flags, script and arguments; return its number."""
        result = self.run("sbatch", "--parsable", *argv, cwd=cwd, env=env)
        assert result.returncode == 0, f"sbatch failed:\n{result.stdout}{result.stderr}"
        return int(result.stdout.split(";")[0])

    def job_fields(self, job_id: int | str) -> dict[str, str]:
        """Return what ``scontrol show job`` knows, by SLURM's own field names."""
        result = self.run("scontrol", "show", "job", str(job_id), "-o")
        assert result.returncode == 0, result.stderr
        return dict(word.split("=", 1) for word in result.stdout.split() if "=" in word)

    def finish(self, submit: Callable[[], int], timeout: float) -> JobResult:
        """Submit a job and wait for its end; submit again if SLURM cut a request of MPI_Init.

        Past ``timeout`` seconds it is cancelled and the test fails.
        """
        for start in range(1, MOST_STARTS + 1):
            job_id = submit()
            fields = self.wait_for_job(job_id, timeout)
            if CUT_REQUEST not in job_output(fields) or start == MOST_STARTS:
                break
            Path(fields["StdOut"]).unlink()  # the next job may write the same file, but later
        code = int(fields["ExitCode"].split(":")[0])
        return JobResult(fields["JobState"], code, job_output(fields))

    def wait_for_job(self, job_id: int, timeout: float) -> dict[str, str]:
        """Return the fields of a job that has ended; one whose request was cut is cancelled."""
        deadline = time.monotonic() + timeout
        while (fields := self.job_fields(job_id))["JobState"] not in FINAL_STATES:
            cut = CUT_REQUEST in job_output(fields)
            late = time.monotonic() > deadline
            if cut or late:
                self.run("scancel", "--signal=KILL", "--full", str(job_id))
            assert not late, (
                f"job {job_id} is {fields['JobState']} ({fields['Reason']}) after {timeout} s\n"
                f"{job_output(fields)}\n{self.logs()}"
            )
            time.sleep(0.2)
        return fields

    def logs(self, lines: int = 30) -> str:
        """Return the last lines of every daemon's log, for the message of a failing test."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)


def job_output(fields: Mapping[str, str]) -> str:
    """Return what a batch job has printed so far."""
    path = Path(fields["StdOut"])
    return path.read_text(errors="replace") if path.exists() else ""


def is_free(port: int) -> bool:
    """Return whether nobody has this TCP port of loopback now."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def free_ports(count: int) -> list[int]:
    """Return TCP ports that are free on loopback now.

    They lie below those that the system gives to whoever asks for any: nobody gets one of these
    before the daemons have started.
    """
    shuffled = random.SystemRandom().sample(range(20_000, 32_000), 1000)
    return list(itertools.islice(filter(is_free, shuffled), count))


def configuration(folder: Path, nodes: tuple[str, ...], cpus: int) -> str:
    """Return the text of slurm.conf."""
    control_port, *node_ports = free_ports(1 + len(nodes))
    host = socket.gethostname().split(".")[0]
    user = getpass.getuser()
    lines = [
        "ClusterName=mpipar",
        # MPICH names its shared memory after the job: job 1 of every cluster would meet what a
        # killed job 1 of an earlier cluster has left on this host, and hang.
        f"FirstJobId={1 + secrets.randbelow(2**25)}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control_port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # A job that is requeued waits until the credentials of its first start have expired.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        # More CPUs are declared than this host has; nothing is bound, so no cgroups are needed.
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=20",
        "MessageTimeout=30",
        "SlurmdTimeout=120",
    ]
    for name, port in zip(nodes, node_ports, strict=True):
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
            " State=UNKNOWN"
        )
    lines.append(f"PartitionName=test Nodes={','.join(nodes)} Default=YES State=UP")
    return "\n".join(lines) + "\n"


def start_daemons(cluster: SlurmCluster) -> None:
    """Start munged, slurmctld and one slurmd for each node, each in a process group of its own."""
    folder = cluster.folder
    munge = {
        "key-file": folder / "munge.key",
        "socket": folder / "munge.socket",
        "pid-file": folder / "munged.pid",
        "log-file": folder / "munged.log",
        "seed-file": folder / "munge.seed",
    }
    commands = [["munged", "--foreground", *(f"--{key}={path}" for key, path in munge.items())]]
    commands += [["slurmctld", "-D", "-c", "-f", str(cluster.config)]]
    commands += [node_command(cluster, node) for node in cluster.nodes]
    for command in commands:
        cluster.daemons.append(start_daemon(cluster, command))
        if command[0] == "munged":
            wait_for(munge["socket"].exists, "munged's socket", cluster)


def node_command(cluster: SlurmCluster, node: str) -> list[str]:
    """Return the command of one node's daemon."""
    return ["slurmd", "-D", "-N", node, "-f", str(cluster.config)]


def start_daemon(cluster: SlurmCluster, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a daemon in a process group of its own; its output is added to a log."""
    with (cluster.folder / f"start-{command[0]}.log").open("ab") as log:
        return subprocess.Popen(
            [find_program(command[0]), *command[1:]],
            env=cluster.environment(),
            cwd=cluster.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def start_node(cluster: SlurmCluster, node: str) -> None:
    """Start the daemon of a node that was killed; `stop` ends it with the others."""
    cluster.daemons.append(start_daemon(cluster, node_command(cluster, node)))


def kill_node(cluster: SlurmCluster, node: str) -> None:
    """End everything that runs on a node at once, as a loss of power would, and tell SLURM.

    It would see the loss itself after SlurmdTimeout. One that is short enough to wait for also
    loses a node that is only slow.
    """
    ranks = processes_with("SLURMD_NODENAME", node)
    parents = {parent_of(pid) for pid in ranks}
    daemon = int((cluster.folder / f"slurmd-{node}.pid").read_text())
    for pid in (daemon, *parents, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")


def parent_of(pid: int) -> int:
    """Return the id of the process that a process was started by."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def wait_for(condition, what: str, cluster: SlurmCluster) -> None:
    """Poll ``condition`` until it holds; a daemon that ends or too long a wait is an error."""
    deadline = time.monotonic() + START_LIMIT
    while not condition():
        ended = [process.args for process in cluster.daemons if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"no {what}; daemons that ended: {ended}\n{cluster.logs()}")
        time.sleep(0.1)


def stop(cluster: SlurmCluster) -> None:
    """End the daemons and every process they started; leave nothing running.

    Job steps leave the daemons' process groups, so they are found by their environment.
    """
    mark = ("SLURM_CONF", str(cluster.config))
    for sign in (signal.SIGTERM, signal.SIGKILL):
        kill_with(*mark, sign)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            for process in cluster.daemons:
                process.poll()  # reaps a daemon that has ended
            if not processes_with(*mark):
                return
            time.sleep(0.05)


@contextlib.contextmanager
def slurm_cluster(nodes: tuple[str, ...] = ("n1", "n2"), cpus: int = 4) -> Iterator[SlurmCluster]:
    """Run a cluster of ``nodes`` with ``cpus`` declared CPUs each; tear it down on leaving."""
    # Not pytest's folder: too long for a unix socket, and munged refuses folders closed to others.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    cluster = SlurmCluster(folder, nodes)
    cluster.config.write_text(configuration(folder, nodes, cpus))

    def all_idle() -> bool:
        result = cluster.run("sinfo", "-h", "-N", "-o", "%T", timeout=30.0)
        return result.stdout.split() == ["idle"] * len(nodes)

    try:
        start_daemons(cluster)
        wait_for(all_idle, "idle nodes", cluster)
        yield cluster
    finally:
        stop(cluster)
        shutil.rmtree(folder, ignore_errors=True)
