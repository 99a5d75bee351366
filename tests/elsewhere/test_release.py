"""What a site meets first: versions, containers, scripts of launchers, a package from nothing."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path

import pytest
from helpers import REPOSITORY, find_launcher, run_command, run_ranks
from program import LIMIT, PROGRAM, environment, metrics

import mpipar

DEPLOY = REPOSITORY / "deploy"
CITATION = (REPOSITORY / "CITATION.cff").read_text()
CHANGES = (REPOSITORY / "CHANGELOG.md").read_text()
WORKFLOW = (REPOSITORY / ".github" / "workflows" / "check.yml").read_text()


def run_well(
    argv: list[str], env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> str:
    """Return what a command has printed that must end with 0."""
    done = run_command(argv, LIMIT, env, cwd)
    assert done.returncode == 0, done.tail()
    return done.stdout


def copied() -> dict[str, list[str]]:
    """Return what each definition of a container copies into it, from the top of the repository."""
    docker = (DEPLOY / "Dockerfile").read_text()
    apptainer = (DEPLOY / "apptainer.def").read_text()
    files = re.search(r"^%files\n((?: +\S+ \S+\n)+)", apptainer, re.MULTILINE)
    return {
        "Dockerfile": [
            name
            for line in re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE)
            for name in line.split()
        ],
        "apptainer.def": [line.split()[0] for line in files[1].splitlines()],
    }


def test_one_version_everywhere():
    metadata = ConfigParser()
    metadata.read(REPOSITORY / "setup.cfg")
    first = re.search(r"^## (\S+?),? ", CHANGES + " ", re.MULTILINE)[1]
    cited = re.search(r"^version: (\S+)$", CITATION, re.MULTILINE)[1]
    assert {metadata["metadata"]["version"], first, cited} == {mpipar.__version__}
    assert "author = The mpipar authors" in (REPOSITORY / "setup.cfg").read_text()


def test_the_forge_runs_the_whole_check():
    assert "bash .ci/run" in WORKFLOW
    doctor = (REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text()
    assert "mpipar doctor" in doctor


@pytest.mark.parametrize("name", copied())
def test_containers_copy_what_is_there(name):
    names = copied()[name]
    assert names == ["setup.cfg", "pyproject.toml", "README.md", "LICENSE", "mpipar"]
    let_through = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for one in names:
        assert (REPOSITORY / one).exists()
        assert f"!{one}" in let_through


@pytest.mark.slow
def test_what_containers_install_is_enough(tmp_path):
    install = {
        re.search(r"pip install --no-cache-dir '(.*)'$", path.read_text(), re.MULTILINE)[1]
        for path in (DEPLOY / "Dockerfile", DEPLOY / "apptainer.def")
    }
    assert install == {".[mpich,cpu,text]"}
    for name in copied()["Dockerfile"]:
        run_well(["cp", "-r", str(REPOSITORY / name), str(tmp_path)])
    packages = tmp_path / "packages"
    run_well(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), "."],
        cwd=tmp_path,
    )  # with the packages that are here already
    doctor = run_ranks(2, (*PROGRAM, "doctor"), LIMIT, {"PYTHONPATH": str(packages)}, "/")
    assert f"mpipar {mpipar.__version__}" in doctor.stdout, doctor.tail()


@pytest.fixture
def site(tmp_path):
    """A folder to submit from, with the environment that scripts of sites activate."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    programs = Path(sys.executable).parent
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    return tmp_path


@pytest.mark.slow
def test_pbs(site):
    job = {
        "PBS_O_WORKDIR": str(site),
        "PBS_NODEFILE": str(site / "nodes"),
        "PBS_JOBID": "12.server",
        "MPIPAR_FLAGS": "--steps 2 --layout dp=2 --save-interval 1",
    }
    for expected in ("dp 2", "step 2"):  # the second time it continues
        printed = run_well(["bash", str(DEPLOY / "train.pbs")], environment(job), site)
        assert expected in printed
        assert "runs/job-12" in printed


@pytest.mark.slow
def test_flux(site):
    script = ["bash", str(DEPLOY / "train.flux"), "--out", "runs/first", "--steps", "2"]
    done = run_ranks(2, script, LIMIT, environment(), site)
    assert done.returncode == 0, done.tail()
    assert "runs/first" in done.stdout


def test_the_job_of_kubernetes_is_a_command_that_trains():
    text = (DEPLOY / "mpijob.yaml").read_text()
    words = re.search(r"command: \[(.*?)\]", text, re.DOTALL)[1].split(", ")[:7]
    launcher, dash_n, ranks, program, command, flag, layout = [one.strip('"') for one in words]
    assert (launcher, dash_n, program, command, flag) == (
        "mpiexec",
        "-n",
        "mpipar",
        "train",
        "--layout",
    )
    slots = re.search(r"slotsPerWorker: (\d+)", text)[1]
    workers = re.search(r"Worker:\n +replicas: (\d+)", text)[1]
    assert int(ranks) == int(slots) * int(workers)
    explained = run_well([*PROGRAM, "explain", "--layout", layout], environment())
    assert f"rank 0 of {ranks}: " in explained


@pytest.mark.reframe
def test_reframe_runs_the_checks(tmp_path):
    partition = {"name": "cpu", "scheduler": "local", "launcher": "mpirun", "environs": ["here"]}
    site = {
        "systems": [{"name": "here", "hostnames": [".*"], "partitions": [partition]}],
        "environments": [{"name": "here"}],
    }
    (tmp_path / "site.py").write_text(f"site_configuration = {json.dumps(site)}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    checks = ["-c", str(DEPLOY / "reframe_checks.py"), "-r", "--performance-report"]
    printed = run_well(
        ["reframe", "-C", "site.py", "--exec-policy=serial", *checks],
        environment({"PATH": path, "HOME": str(tmp_path)}),
        tmp_path,
    )
    assert "Ran 3/3 test case(s) from 3 check(s) (0 failure(s)" in printed
    figures = [float(value) for value in re.findall(r"^P: \w+: (\S+)", printed, re.MULTILINE)]
    assert len(figures) == 3
    assert min(figures) > 0


# --- `pip install .` installs what is in the repository, and its program runs from there


PACKAGE = REPOSITORY / "mpipar"
INPUTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def files_in(folder):
    """{path: bytes} of the files of a package, without compiled files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip has installed the package into."""
    sources, target = (tmp_path_factory.mktemp(name) for name in ("sources", "installed"))
    for name in INPUTS:
        shutil.copy(REPOSITORY / name, sources)
    shutil.copytree(PACKAGE, sources / "mpipar", ignore=shutil.ignore_patterns("__pycache__"))
    result = run_command(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--root-user-action=ignore",
            "--target",
            target,
            sources,
        ],
        LIMIT,
    )
    assert result.returncode == 0, result.tail()
    return target


def test_installed_files_are_the_sources(installed):
    ours, theirs = files_in(PACKAGE), files_in(installed / "mpipar")
    assert sorted(theirs) == sorted(ours), "see packages and package_data in setup.cfg"
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_console_script(installed, tmp_path):
    """The script is `mpipar`, and it runs the installed copy, not the sources."""
    scripts = configparser.ConfigParser()
    (path,) = installed.glob("mpipar-*.dist-info/entry_points.txt")
    scripts.read(path)
    assert dict(scripts["console_scripts"]) == {"mpipar": "mpipar.__main__:main"}
    environment = {"PYTHONPATH": str(installed), "PYTHONVERBOSE": "1"}
    result = run_command([installed / "bin" / "mpipar", "--help"], LIMIT, environment, cwd=tmp_path)
    assert result.returncode == 0, result.tail()
    assert result.stdout.startswith("usage: mpipar COMMAND")
    assert f"{installed}/mpipar/cli.py" in result.stderr
    assert f"{PACKAGE}/cli.py" not in result.stderr


def test_core_needs_no_more_than_it_says():
    """MPI libraries, CuPy and PyTorch are extras: a core that pulls them in breaks clusters."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    names = {line.split(">=")[0] for line in setup["options"]["install_requires"].split()}
    assert names == {"numpy", "mpi4py", "safetensors", "ml_dtypes", "threadpoolctl", "tqdm"}
    for extra, text in setup["options.extras_require"].items():
        assert text.strip(), extra


# --- docs/from-nothing.sh, run unchanged: from Python's documentation to a model of transformers


LONG = 420  # it takes a minute and a half on two cores; here other tests may run beside it


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.text
@pytest.mark.timeout(LONG + 30)
def test_from_nothing_to_a_model_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="text: transformers is not installed")
    if find_launcher() is None or not shutil.which("pkill"):
        pytest.skip("no mpiexec, or no pkill")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = REPOSITORY / "docs" / "from-nothing.sh"
    result = subprocess.run(
        ["bash", script, tmp_path / "here"],
        timeout=LONG,
        env={**os.environ, **environment(), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = result.stdout
    assert result.returncode == 0, text[-3000:]
    assert "tokenizer: 2,048 ids in uint16" in text
    assert re.search(r"step 40: held-out loss \d\.\d+ nats per token over 4,096 tokens", text)
    assert "took over the lock" in text
    assert re.search(r"resumed after step [4-9]0: .*, as before", text)
    losses = [float(found) for found in re.findall(r"step \d+: held-out loss (\S+)", text)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 6.3 < 7 < metrics(tmp_path / "here" / "run")[0]["loss"]
    assert text.endswith("== done\n")
