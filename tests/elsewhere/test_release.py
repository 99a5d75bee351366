"""What a site meets first: versions, containers, scripts of launchers, a package from nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers import REPOSITORY, find_launcher, run_command, run_ranks
from program import LIMIT, PROGRAM, environment, metrics

import mpipar
from docs import conf

DEPLOY = REPOSITORY / "deploy"
CITATION = (REPOSITORY / "CITATION.cff").read_text()
CHANGES = (REPOSITORY / "CHANGELOG.md").read_text()


def run_well(
    argv: list[str], env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> str:
    """Return what a command has printed that must end with 0."""
    done = run_command(argv, LIMIT, env, cwd)
    assert done.returncode == 0, done.tail()
    return done.stdout


def test_one_version_everywhere():
    metadata = ConfigParser()
    metadata.read(REPOSITORY / "setup.cfg")
    first = re.search(r"^## (\S+?),? ", CHANGES + " ", re.MULTILINE)[1]
    cited = re.search(r"^version: (\S+)$", CITATION, re.MULTILINE)[1]
    assert {metadata["metadata"]["version"], first, cited} == {mpipar.__version__}
    assert "author = The mpipar authors" in (REPOSITORY / "setup.cfg").read_text()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip has installed the package into, from what containers copy."""
    sources, target = (tmp_path_factory.mktemp(name) for name in ("sources", "installed"))
    docker, apptainer = ((DEPLOY / name).read_text() for name in ("Dockerfile", "apptainer.def"))
    copied = re.findall(r"^COPY (.*) \S+$", docker, re.MULTILINE)
    names = " ".join(copied).split()
    for name in names:
        assert f"{name} " in apptainer
        assert f"!{name}" in (REPOSITORY / ".dockerignore").read_text().splitlines()
        run_well(["cp", "-r", str(REPOSITORY / name), str(sources)])
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    run_well([*pip, "--no-build-isolation", "--target", str(target), str(sources)])
    return target


def test_installed_files_are_the_sources(installed):
    ours, theirs = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        for folder in (REPOSITORY / "mpipar", installed / "mpipar")
    )
    assert sorted(theirs) == sorted(ours), "see packages and package_data in setup.cfg"
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_the_installed_program_runs_outside_the_repository(installed, tmp_path):
    """The script is the installed copy, and so are the ranks of a job."""
    own = {"PYTHONPATH": str(installed)}
    shown = run_well([str(installed / "bin" / "mpipar"), "--help"], own, tmp_path)
    assert shown.startswith("usage: mpipar COMMAND")
    doctor = run_ranks(2, (*PROGRAM, "doctor"), LIMIT, own, tmp_path)
    assert f"mpipar {mpipar.__version__}" in doctor.stdout, doctor.tail()
    assert str(installed) in doctor.stdout + run_well(
        [sys.executable, "-c", "import mpipar; print(mpipar.__file__)"], own, tmp_path
    )


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


# --- the documentation as a site: Sphinx warns about nothing, every page is there, links work


@pytest.mark.sphinx
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-qW", "-d", tmp_path / "read", "docs", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    written = [path.relative_to(conf.DOCS).with_suffix(".html") for path in conf.DOCS.rglob("*.md")]
    assert len(written) > 20
    assert set(written) <= pages.keys()
    index = next(text for path, text in pages.items() if str(path) == "index.html")
    assert all(f'href="{path}"' in index for path in written if str(path) != "index.html")
    for path, text in pages.items():
        assert 'href="#../' not in text, path
        for link in re.findall(r'href="([^"#:?]+)["#?]', text):
            assert (tmp_path / path.parent / unquote(link)).exists(), (path, link)


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
    assert "2,048 ids in uint16" in text
    assert re.search(r"step 40: held-out loss \d\.\d+ nats per token over 4,096 tokens", text)
    assert "took over the lock" in text
    assert re.search(r"resumed after step [4-9]0: .*, as before", text)
    losses = [float(found) for found in re.findall(r"step \d+: held-out loss (\S+)", text)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 6.3 < 7 < metrics(tmp_path / "here" / "run")[0]["loss"]
    assert text.endswith("== done\n")
