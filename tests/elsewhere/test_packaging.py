"""`pip install .` installs what is in the repository, and its program runs from there.

The README installs a link to the sources (-e). So these tests build and install the package once
more. They use a copy of the sources, a separate folder, and no download.
"""

import configparser
import shutil
import sys

import pytest
from helpers import REPOSITORY, run_command

PACKAGE = REPOSITORY / "mpipar"
LIMIT = 100.0
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
