"""Variables of launchers, settings made before NumPy and MPI are loaded, and doctor's report."""

import itertools
import math
import os
import platform
import re
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, run_command, run_ranks
from program import LIMIT, PROGRAM, environment

from mpipar.comm.groups import stated_awareness
from mpipar.comm.launcher import Launcher, read_launcher
from mpipar.commands.doctor import launch_remarks, remarks
from mpipar.run.process import environment as settings
from mpipar.run.process import mpi
from mpipar.run.process.environment import (
    THREAD_VARIABLES,
    YIELD_VARIABLES,
    chosen_by_user,
    cpu_quota,
    presets,
)

HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = BATCH | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, Launcher()),
        (HYDRA, Launcher("MPICH's mpiexec", 3, 4, 1, 2)),
        (OPEN_MPI, Launcher("Open MPI's mpirun", 3, 4, 1, 2)),
        (BATCH, Launcher()),
        (STEP, Launcher("srun", 3, 4, 0, 1)),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Launcher("srun", 3, 4, 0, 1)),
        (STEP | HYDRA, Launcher("MPICH's mpiexec", 3, 4, 1, 2)),
        (BATCH | HYDRA, Launcher("MPICH's mpiexec", 3, 4, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launcher("a PMI launcher", 1, 2, 1, 2)),
        (STEP | {"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"},
         Launcher("srun", 3, 4, 0, 2)),
    ],
)  # fmt: skip
def test_launcher_is_recognized(environ, launcher):
    assert read_launcher(environ) == launcher


@pytest.mark.parametrize(
    ("environ", "num_cores", "threads"),
    [
        ({}, 8, "8"),
        (HYDRA, 8, "4"),
        (HYDRA, 1, "1"),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, 8, "2"),
        (STEP | {"SLURM_CPUS_PER_TASK": "4"}, 16, "4"),
        (STEP | {"SLURM_CPUS_PER_TASK": "4"}, 2, "2"),
        (BATCH | HYDRA | {"SLURM_CPUS_PER_TASK": "8"}, 8, "4"),
        # `export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK` outside a job that sets it
        (HYDRA | {"OMP_NUM_THREADS": ""}, 8, "4"),
        (HYDRA | {"OMP_NUM_THREADS": "abc"}, 8, "4"),
        (HYDRA | {"OMP_NUM_THREADS": "0"}, 8, "4"),
    ],
)
def test_ranks_of_a_host_share_its_cores(environ, num_cores, threads):
    chosen = presets(environ, num_cores)
    assert {chosen[name] for name in THREAD_VARIABLES} == {threads}


def test_what_a_process_sets_for_itself_and_what_the_user_has_chosen():
    """Waiting ranks give their core away only where there are too few."""
    assert not set(YIELD_VARIABLES) & set(presets(HYDRA, 2))
    crowded, name = presets(HYDRA, 1), next(iter(YIELD_VARIABLES))
    assert set(YIELD_VARIABLES) <= set(crowded)
    assert crowded["UCX_DEBUG_SIGNO"] == "0", "MPI leaves SIGHUP to the run"
    own = {name: "1000", "UCX_DEBUG_SIGNO": "SIGHUP"}
    assert not own.keys() & presets(HYDRA | own, 1).keys()
    for value, name in itertools.product(("3", " 2", "2,1"), THREAD_VARIABLES):
        assert not set(THREAD_VARIABLES) & set(presets(HYDRA | {name: value}, 8))
    user = {"MPIR_CVAR_X": "1", "OMPI_MCA_coll": "tuned", "OMP_NUM_THREADS": "2"}
    user[settings.CORETYPE] = "Nehalem"
    others = {"OMPI_MCA_orte_hnp_uri": "a", "OMPI_MCA_ess_base_vpid": "3", "HOME": "/"}
    assert chosen_by_user(user | others, ()) == user
    assert chosen_by_user(crowded, crowded) == {}


# --- doctor


def test_doctor_shows_every_rank_and_multiplies_with_the_kernels_of_the_vector_units(
    no_launcher, monkeypatch
):
    monkeypatch.delenv(settings.CORETYPE)
    text = run_ranks(3, [*PROGRAM, "doctor"], LIMIT).ended().stdout
    rows = re.findall(r"^(\d+) +(\S+) +[\d,-]+ +(\d+) +\S.+$", text, re.MULTILINE)
    assert rows == [(str(rank), os.uname().nodename, "1") for rank in range(3)]
    assert "\nranks          3 on 1 host(s)\n" in text
    for word in ("MPI library", "thread level", "GPU-aware MPI", "launcher", "MPI self-test"):
        assert f"\n{word}" in text
    name = settings.kernels_for(settings.processor()[1])
    assert name is None or f"kernels for {name}" in text


@pytest.mark.parametrize(
    ("library", "kinds", "environ", "support", "verdict"),
    [
        ("MPICH", "mpi,system", {}, 0, "no"),
        ("MPICH", "mpi,system,cuda:device", {}, None, "yes"),
        ("MPICH", None, {}, 0, "no"),
        ("Open MPI", None, {}, 0, "unknown"),
        ("Open MPI", None, {}, 1, "yes"),
        ("Open MPI", None, {}, None, "unknown"),
        ("Open MPI", "mpi,system", {"MPIPAR_CUDA_AWARE": "yes"}, 0, "yes"),
        ("MPICH", "mpi,cuda", {"MPIPAR_CUDA_AWARE": "no"}, 1, "no"),
        ("CRAY MPICH", None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None, "yes"),
    ],
)
def test_gpu_awareness_is_never_guessed(library, kinds, environ, support, verdict):
    assert stated_awareness(library, kinds, environ, support)[0] == verdict


def fact(host, cores, threads, **more):
    return {"world_rank": 0, "host": host, "cores": range(cores), "threads": threads, **more}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([fact("a", 2, 1)] * 2, ""),
        ([fact("a", 1, 1), fact("b", 1, 1)], ""),
        ([fact("a", 2, 1)] * 3, "3 ranks share 2 core(s)"),
        ([fact("a", 2, 2)] * 2, "set OPENBLAS_NUM_THREADS=1"),
        ([fact("a", 4, 2, quota=2.5)], ""),
        ([fact("a", 4, 2, quota=2.5)] * 2, "4 BLAS threads, but the time of 2.5 core(s)"),
        ([fact("a", 9, 1, gpu="A"), fact("a", 9, 1, gpu="B"), fact("b", 9, 1, gpu="A")], ""),
        ([fact("a", 9, 1, gpu="A")] * 2, "2 ranks share 1 GPU(s)"),
    ],
)
def test_remarks_say_what_is_wrong_with_cores_and_gpus(facts, said):
    found = remarks(facts)
    assert len(found) == bool(said)
    assert said in "".join(found)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "150000 100000"}, 0.5),
        ("3:cpu,cpuacct:/a\n1:memory:/a", {}, math.inf),
    ],
)  # fmt: skip
def test_the_quota_of_a_control_group_is_seen(own, files, cores, tmp_path):
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cpu_quota(tmp_path / "own", tmp_path / "fs") == cores


FAULTS = """
import resource, sys
from mpipar.run.process.environment import keep_heap
assert keep_heap() == (sys.argv[1] == "keep")
import numpy as np
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1 << 17) for _ in range(64)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="the C library is not glibc")
def test_a_freed_array_s_memory_serves_the_next_one():
    """64 MiB in 4 KiB pages; a user's own threshold, which is glibc's default, stays."""
    counts = {}
    for word, own in (("keep", {}), ("leave", {"MALLOC_MMAP_THRESHOLD_": "131072"})):
        result = run_command([sys.executable, "-c", FAULTS, word], 60.0, environment() | own)
        assert result.returncode == 0, result.tail()
        counts[word] = int(result.stdout)
    assert counts["keep"] < 1000 < 10000 < counts["leave"]


# --- the launcher's library


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """Let these libraries exist, and none in the Python environment; return the set."""
    here = set()
    monkeypatch.setattr(mpi, "_loads", here.__contains__)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(mpi, "_start_with_link", lambda environ, _: environ.update(again="yes"))
    return here


@pytest.mark.parametrize(
    ("launcher", "libraries", "environ", "added"),
    [
        ("MPICH's mpiexec", ["libmpi.so.12", "libmpi.so.40"], {}, {mpi.LIBRARY: "libmpi.so.12"}),
        ("Open MPI's mpirun", ["libmpi.so.12", "libmpi.so.40"], {}, {mpi.LIBRARY: "libmpi.so.40"}),
        ("MPICH's mpiexec", ["libmpi.so.40"], {}, {"again": "yes"}),
        ("Open MPI's mpirun", ["libmpi.so.12"], {}, {}),
        ("srun", [], {}, {}),
        ("MPICH's mpiexec", ["libmpi.so.12"], {mpi.LIBRARY: "/other"}, {}),
        ("MPICH's mpiexec", ["libmpi.so.40"], {mpi.ABI: "openmpi"}, {}),
        (None, [], {}, {}),
    ],
)
def test_of_several_libraries_the_launcher_s_is_loaded(launcher, libraries, environ, added, loaded):
    loaded.update(libraries)
    found = dict(environ)
    mpi.choose_library(Launcher(launcher, 0, 2), found)
    assert found == environ | added
    own = Path(sys.prefix, "lib")  # what the Python environment has of its own comes first
    own.mkdir()
    (own / "libmpi.so.12").touch()
    found = {}
    mpi.choose_library(Launcher(launcher, 0, 2), found)
    assert found == {}


def test_a_world_that_its_launcher_does_not_know_is_refused(tmp_path):
    """The examples and a program of one's own, as under srun without PMI."""
    variables = environment() | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    own = tmp_path / "own.py"
    own.write_text(
        "from mpi4py import MPI\nimport mpipar\n"
        "ops = mpipar.make_ops('cpu', 'float32')\n"
        "mpipar.Comms(mpipar.Grid(0), ops, mpipar.Recorder(), MPI.COMM_WORLD)\n"
    )
    examples = REPOSITORY / "docs" / "examples"
    for file, said in (
        (own, "this process is alone (rank 0 of 1), but srun started 2"),
        (examples / "one_file.py", "MPI does not know the other ranks of this launcher"),
    ):
        result = run_command([sys.executable, str(file)], 60.0, variables)
        assert result.returncode == 1
        assert said in result.stderr, result.tail()
        assert result.stdout == ""


def test_doctor_says_what_open_mpi_s_launcher_wants():
    assert launch_remarks("MPICH Version: 5.0.2", 2, 0) == []
    (four,) = launch_remarks("Open MPI v4.1.4, package", 2, 0)
    assert "without --oversubscribe; as root it also needs --allow-run-as-root" in four
    (five,) = launch_remarks("Open MPI v5.0.11, package", 2, 1000)
    assert "without --map-by :OVERSUBSCRIBE; see" in five


# --- the BLAS kernels of a process: by its vector units, before NumPy is loaded


NEW, OLD = settings.KERNELS["SkylakeX"], settings.KERNELS["Haswell"]


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Set the vector units of the processor; NumPy counts as not loaded."""
    monkeypatch.setattr(settings, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delitem(sys.modules, "numpy")

    def set_units(*units):
        text = f"model name\t: A CPU\nflags\t\t: fpu {' '.join(units)}\n"
        settings.CPUINFO.write_text(f"{text}\nmodel name\t: B\nflags\t: other\n")

    return set_units


def chosen(**environ):
    settings.choose_kernels(environ)
    return environ.get(settings.CORETYPE)


@pytest.mark.parametrize(
    ("units", "kernels"),
    [(NEW, "SkylakeX"), (OLD, "Haswell"), ((*NEW, "avx512_bf16"), "SkylakeX"), (("avx2",), None)],
)
def test_the_vector_units_say_the_kernels(processor, units, kernels):
    assert (settings.processor(), chosen()) == (("", frozenset()), None)  # it is unknown
    processor(*units)
    assert settings.processor() == ("A CPU", {"fpu", *units})
    assert chosen() == kernels
    sys.modules["numpy"] = None  # loaded: then it is too late
    assert chosen() is None


def test_a_name_that_the_user_has_set_wins(processor):
    processor(*OLD)
    assert chosen(OPENBLAS_CORETYPE="Nehalem") == "Nehalem"
