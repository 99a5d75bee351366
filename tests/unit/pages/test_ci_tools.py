"""The small programs under .ci/: each must find what it looks for."""

import itertools
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from conftest import beyond_pairs
from helpers import REPOSITORY

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
        ("def f(a, b, c, d, e, f, g, h):\n    x = 1\n", "f has 8 positional parameters"),
        ("@cached\ndef f(self, a, b, c, d, e, f, g, h):\n    x = 1\n", "f has 8 positional"),
    ],
)
def test_budget_finds(text, message):
    found = list(tool("budget.py")["problems"](Path("x.py"), text))
    assert len(found) == 1
    assert message in found[0][1]


def test_budget_lets_pass():
    texts = [
        "def f():\n    '''Do it.'''\n" + "    x = 1\n" * 50 + "y = 1\n" * 1340,
        "def f(self, a, b, c, d, e, f, g, *, h):\n    x = 1\n",
        "@compiled(FAST)\ndef f(a, b, c, d, e, f, g, h):\n    x = 1\n",
    ]
    for text in texts:
        assert not list(tool("budget.py")["problems"](Path("x.py"), text))


def test_readme_command():
    readme_command = tool("readme_command.py")["readme_command"]
    text = "a\n<!-- command: train -->\n```bash\nx && \\\n  y\n```\n"
    text += "<!-- command: test -->\n```\nz\n```\n"
    assert readme_command(text, "train") == "x && \\\n  y"
    assert readme_command(text, "test") == "z"
    with pytest.raises(LookupError, match="command: other"):
        readme_command(text, "other")


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


def test_summary_a_later_section_ran_it(tmp_path):
    (tmp_path / "one.xml").write_text(CASES)
    case = '<testcase classname="tests.test_{}" name="test_{}" />'
    cases = case.format("a", "waits") + case.format("b", "any")
    (tmp_path / "two.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    result = summary(tmp_path)
    assert result.stdout.splitlines()[-1] == "total: 4 passed, 0 failed, 0 skipped"


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
