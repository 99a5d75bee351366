"""The structure of the code: who imports whom, who may speak to MPI, what layers may not do.

Each rule has broken twins below: made-up modules that break it and must be caught.
"""

import itertools
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import beyond_pairs
from helpers import REPOSITORY, run_command
from program import LIMIT, environment
from structure_rules import (
    FLOORS,
    PACKAGE,
    RULES,
    SOURCES,
    array_math_problems,
    circle,
    floor_problems,
    folder,
    import_graph,
    mpi_problems,
    outside_problems,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule):
    assert len(SOURCES) > 50
    found = [problem for module, source in SOURCES.items() for problem in rule(module, source)]
    assert not found, "\n".join(found)


def test_no_imports_in_a_circle():
    assert circle(import_graph(SOURCES)) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_every_floor_is_there():
    assert {folder(module) for module in SOURCES} == {*FLOORS, "__init__"}


def test_the_root_holds_little_else_than_folders():
    files = {module for module in SOURCES if "." not in module and not (PACKAGE / module).is_dir()}
    assert files == {"__init__", "__main__", "cache", "cli", "errors"}


def test_what_needs_no_mpi_does_not_load_it():
    code = ("import sys\n"
            "from mpipar.__main__ import main\n"
            "for line in 'schedule 1f1b,explain --tp 2,--help,train --print-config'.split(','):\n"
            "    sys.argv = ['mpipar', *line.split()]\n"
            "    try: main()\n"
            "    except SystemExit as leaving: assert not leaving.code, leaving\n"
            "loaded = {'mpi4py.MPI', 'torch', 'cupy'} & set(sys.modules)\n"
            "assert not loaded, loaded\n"
            "print('nothing loaded')\n")  # fmt: skip
    result = run_command([sys.executable, "-c", code], LIMIT, environment())
    assert result.returncode == 0, result.tail()
    assert result.stdout.endswith("nothing loaded\n")


def test_numpy_is_not_loaded_before_its_threads_are_set():
    """Otherwise BLAS takes all cores in each rank: ten times slower where ranks share cores."""
    code = ("import sys, mpipar.__main__, mpipar.cli\n"
            "for name in ('train', 'generate', 'verify', 'net', 'doctor'):\n"
            "    mpipar.cli.command_of(name)\n"
            "assert 'numpy' not in sys.modules\n")  # fmt: skip
    result = run_command([sys.executable, "-c", code], LIMIT, environment())
    assert result.returncode == 0, result.tail()


LAYER = """
class Layer:
    def __init__(self, ops, width):
        self.half = width // 2
    def forward(self, x, stash):
        {line}
        return x.reshape(x.shape[0] * 2, -1)[:, self.half + 1:]
"""
BROKEN = {
    "a lower floor imports a higher one": (
        floor_problems, "layers.made_up", "from mpipar.train.worker import Worker\n", "above"),
    "and late": (
        floor_problems, "comm.x", "def f():\n    import mpipar.ops, mpipar.cli\n", "cli"),
    "a module on no floor": (floor_problems, "surprise", "", "no floor"),
    "an optional package at the top": (outside_problems, "ops.x", "import cupy\n", "optional"),
    "an extra's module at the top": (
        outside_problems, "ops.x", "from mpipar.ops import numba_kernels\n", "extra's"),
    "the tests": (outside_problems, "train.x", "def f():\n    import tests.helpers\n", "imports"),
    "MPI in a layer": (
        mpi_problems, "layers.x", "def f():\n    from mpi4py import MPI\n", "imports mpi4py.MPI"),
    "MPI at the top": (mpi_problems, "comm.mpi", "from mpi4py import MPI\n", "as soon as"),
    "a message past the wire": (
        mpi_problems, "train.gradsync", "def f(c, x):\n    c.Allreduce(x)\n", "calls Allreduce"),
    "a pickle": (mpi_problems, "comm.group", "def f(c):\n    return c.allgather(1)\n", "pickles"),
    "arithmetic": (array_math_problems, "layers.x", LAYER.format(line="x = x + 1"), "BinOp"),
    "in place": (array_math_problems, "models.x", LAYER.format(line="x += 1"), "AugAssign"),
    "a product": (array_math_problems, "layers.x", LAYER.format(line="x = x @ x"), "BinOp"),
    "an operand of reshape": (
        array_math_problems, "layers.x", LAYER.format(line="x = (x * 2).reshape(3)"), "BinOp"),
    "NumPy in a layer": (array_math_problems, "layers.x", "import numpy as np\n", "numpy"),
    "a sum in a cut": (array_math_problems, "layers.parallel.x",
                       "def forward(ops, x, w, comm, name):\n    return x * w\n", "BinOp"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_rule_catches(case):
    rule, module, source, message = BROKEN[case]
    assert any(message in problem for problem in rule(module, source))


def test_rules_let_a_clean_layer_pass():
    source = LAYER.format(line="x = self.ops.accumulate(x, x)")
    assert [problem for rule in RULES for problem in rule("layers.made_up", source)] == []


# --- the small programs under .ci/: each must find what it looks for


TOOLS = REPOSITORY / ".ci"

CASES = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_runs" />
<testcase classname="tests.test_a" name="test_waits">
  <skipped type="pytest.skip" message="gpu: none">x.py:1: gpu: none</skipped></testcase>
<testcase classname="" name="tests.test_b">
  <skipped type="pytest.skip" message="collection skipped">('/x', 7, "Skipped: no b")</skipped>
</testcase>
<testcase classname="tests.test_c" name="test_session">
  <properties><property name="passed_inside" value="3" />
  <property name="skipped_inside" value="test_d - no d" /></properties></testcase>
</testsuite></testsuites>"""


def tool(name: str) -> dict:
    return runpy.run_path(str(TOOLS / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = '" + "y" * 100 + "'\n", "characters, more"),
        ("x = '\u00e9'\n", "not ASCII"),
        ("# TO" + "DO\n", "leftover"),
        ("def f():\n" + "    x = 1\n" * 51, "f has 51 statements"),
    ],
)
def test_budget_finds(text, message):
    found = list(tool("budget.py")["problems"](Path("x.py"), text))
    assert len(found) == 1
    assert message in found[0][1]


def summary(folder: Path, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOLS / "summary.py", folder, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_summary_names_skips(tmp_path):
    (tmp_path / "one.xml").write_text(CASES)
    result = summary(tmp_path, "--must-run", "slurm:")
    assert result.returncode == 0, result.stdout
    for line in ("gpu: none [tests.test_a.test_waits]", "no b [tests.test_b]", "test_d - no d"):
        assert line in result.stdout
    assert result.stdout.splitlines()[-1] == "total: 2 passed, 0 failed, 2 skipped"


def test_summary_fails(tmp_path):
    assert summary(tmp_path).returncode == 1, "no test at all"
    (tmp_path / "one.xml").write_text(CASES)
    assert summary(tmp_path, "--must-run", "gpu:").returncode == 1
    failing = CASES.replace("<skipped", "<failure").replace("</skipped", "</failure")
    (tmp_path / "one.xml").write_text(failing)
    result = summary(tmp_path)
    assert result.returncode == 1
    assert "failed: tests.test_a.test_waits" in result.stdout


class Item(NamedTuple):
    """A case of a test, as pytest describes it."""

    values: tuple
    path: str = "a.py"
    originalname: str = "test_a"

    @property
    def callspec(self):
        return SimpleNamespace(params=dict(enumerate(self.values)))


@pytest.mark.parametrize(("sizes", "count"), [((2, 4, 4), 16), ((4, 6, 2), 24), ((3, 3, 2, 2), 9)])
def test_chosen_cases_let_every_two_values_meet(sizes, count):
    cases = [Item(values) for values in itertools.product(*map(range, sizes))]
    chosen = set(cases) - beyond_pairs(cases)
    assert count <= len(chosen) <= count + 2

    def pairs(items):
        return {two for one in items for two in itertools.combinations(enumerate(one.values), 2)}

    assert pairs(chosen) == pairs(cases)
