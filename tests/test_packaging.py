"""What is installed is what is in the repository: the console script runs the installed copy."""

import configparser
import importlib.metadata
import json

import pytest
from helpers import REPOSITORY

PACKAGE = REPOSITORY / "mpipar"


@pytest.fixture(scope="module")
def installed():
    """Return the installed distribution; skip where there is none or only a link to this folder."""
    found = [
        distribution
        for distribution in importlib.metadata.distributions(name="mpipar")
        if distribution.read_text("direct_url.json")  # not what a build left in this folder
    ]
    if not found:
        pytest.skip("mpipar is not installed here: pip install .")
    origin = json.loads(found[0].read_text("direct_url.json"))
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("mpipar is installed as a link to its sources (pip install -e)")
    return found[0]


def test_installed_files_are_the_sources(installed):
    ours = {
        str(path.relative_to(REPOSITORY)): path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    theirs = {
        str(path): path.read_binary()
        for path in installed.files
        if path.parts[0] == "mpipar" and path.suffix != ".pyc"
    }
    assert sorted(theirs) == sorted(ours), "remove build/ and run pip install again"
    changed = [name for name in ours if ours[name] != theirs[name]]
    assert not changed, f"run pip install again: {changed}"


def test_console_script(installed):
    scripts = {entry.name: entry.value for entry in installed.entry_points}
    assert scripts == {"mpipar": "mpipar.__main__:main"}


def test_core_needs_no_more_than_it_says():
    """MPI libraries, CuPy and PyTorch are extras: a core that pulls them in breaks clusters."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    names = {line.split(">=")[0] for line in setup["options"]["install_requires"].split()}
    assert names == {"numpy", "mpi4py", "safetensors", "ml_dtypes", "threadpoolctl"}
    for extra, text in setup["options.extras_require"].items():
        assert text.strip(), extra
