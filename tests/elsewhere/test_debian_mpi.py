"""Debian's own Open MPI and MPICH with the plain package: hybrid layouts, and the self-test."""

import os
import re
from pathlib import Path

import pytest
from helpers import OVERSUBSCRIBED, REPOSITORY, run_command, run_ranks
from program import LIMIT, PROGRAM, environment, metrics

VENV = os.environ.get("MPIPAR_DEBIAN_VENV", "")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCHERS = {
    "Open MPI": ["mpiexec.openmpi", "--oversubscribe"],
    "MPICH": ["mpiexec.mpich"],  # whose library is called libmpich.so.12
}
TRAIN = """train --layout dp=2,tp=2 --layers 2 --d-model 64 --heads 2 --steps 3 --eval-tokens 1024
    --sample-tokens 0 --log-interval 1""".split()

pytestmark = pytest.mark.skipif(
    not VENV, reason="MPIPAR_DEBIAN_VENV names no environment without an MPI library"
)


def run(name, ranks, *words):
    command = [*LAUNCHERS[name], "-n", str(ranks), str(Path(VENV, "bin", "mpipar")), *words]
    return run_command(command, LIMIT, environment() | OVERSUBSCRIBED | ROOT).ended()


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Return those of the MPICH in this environment."""
    folder = tmp_path_factory.mktemp("wheel") / "run"
    run_ranks(4, [*PROGRAM, *TRAIN, "--out", str(folder)], LIMIT, environment()).ended()
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_hybrid_layout_trains_as_with_the_wheel(name, losses, tmp_path):
    result = run(name, 4, *TRAIN, "--out", str(tmp_path / "run"))
    assert result.returncode == 0, result.tail()
    assert [line["loss"] for line in metrics(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)
    assert (tmp_path / "run" / "weights" / "model.safetensors").exists()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_doctor_names_the_library_whose_reductions_are_right(name):
    result = run(name, 4, "doctor")
    assert result.returncode == 0, result.tail()
    assert re.search(rf"^MPI library +{name}", result.stdout, re.MULTILINE), result.tail()
    assert re.search(r"^MPI self-test +all results right$", result.stdout, re.MULTILINE), (
        result.tail()
    )


PAGE = (REPOSITORY / "docs" / "install.md").read_text()
ENVIRONMENTS = {"Debian and Ubuntu": VENV, "Open MPI": os.environ.get("MPIPAR_OPENMPI_VENV", "")}
COMMANDS = [
    (heading, command)
    for heading in ENVIRONMENTS
    for command in re.findall(
        r"^mpiexec.*train$", PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.MULTILINE
    )
]


def test_the_page_has_commands_for_each_library():
    assert [heading for heading, _ in COMMANDS] == ["Debian and Ubuntu"] * 2 + ["Open MPI"] * 2


@pytest.mark.parametrize(("heading", "command"), COMMANDS)
def test_commands_of_the_page_train(heading, command, tmp_path):
    venv = ENVIRONMENTS[heading]
    if not venv:
        pytest.skip("MPIPAR_OPENMPI_VENV names no Open MPI environment")
    own = {"PATH": f"{venv}/bin:{os.environ['PATH']}"}
    if "--allow-run-as-root" not in command:
        own |= ROOT
    words = ["bash", "-c", f"{command} --steps 2 --out run"]
    run_command(words, LIMIT, environment() | own, tmp_path).ended()
    assert (tmp_path / "run" / "weights" / "model.safetensors").exists()


def test_a_program_of_one_s_own_finds_debian_s_mpich_by_the_link_of_the_page(tmp_path):
    (folder,) = {*re.findall(r"^ +export LD_LIBRARY_PATH=(\S+)$", PAGE, re.MULTILINE)}
    assert folder == "~/mpich"
    (link,) = re.findall(r"^ +(mkdir .* && ln -s .*)$", PAGE, re.MULTILINE)
    program = f"{VENV}/bin/python {REPOSITORY}/docs/examples/one_file.py --steps 1"
    words = f"{link} && export LD_LIBRARY_PATH={folder} && mpiexec.mpich -n 2 {program}"
    env = environment() | {"HOME": str(tmp_path)}
    result = run_command(["bash", "-c", words], LIMIT, env).ended()
    assert "step    1  loss 5." in result.stdout
