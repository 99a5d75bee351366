"""`python -m bench NAME` is `python -m bench.NAME`, and lists what there is."""

import subprocess
import sys

import pytest

from bench.__main__ import main, programs
from mpipar.errors import EXIT_DATA, EXIT_OK, EXIT_USAGE

LIMIT = 60  # seconds


def run(*words):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True,
                          timeout=LIMIT)


@pytest.mark.parametrize("name", ["compare", "step", "step.cable"])
def test_both_names_start_the_same_program(name):
    by_runner, by_module = run("bench", name, "--help"), run(f"bench.{name}", "--help")
    assert by_runner.returncode == EXIT_OK
    assert by_runner.stdout == by_module.stdout
    assert f"python -m bench.{name}" in by_runner.stdout


def test_flags_and_exit_code_are_those_of_the_program():
    assert run("bench", "compare", "no", "file").returncode == EXIT_DATA


def test_the_list_shows_each_program_with_its_subject(capsys):
    assert main([]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(programs())
    assert {"interconnect", "step", "step.against", "docs"} <= set(programs())
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_name_is_refused_with_the_next_one(capsys):
    assert main(["comapre"]) == EXIT_USAGE
    assert "did you mean compare?" in capsys.readouterr().err
