"""`mpipar learn`: examples are listed and shown, and mistakes are named."""

import pytest
from in_process import assert_refused, printed
from program import mpipar

from mpipar.errors import EXIT_USAGE
from mpipar.study.examples.catalog import EXAMPLES


def test_examples_are_listed():
    said = printed("learn")
    for name, one in EXAMPLES.items():
        assert name in said
        assert one.title in said
    assert printed("learn", ranks=2, rank=1) == ""


REFUSED = {
    "no such topic": (["rign"], 1, ["'rign': no such example", "did you mean ring?"]),
    "an exercise of former times": (["check"], 1, ["'check': no such example"]),
    "one rank": (["ffn"], 1, ["2 or 4 ranks, but 1 was", "mpiexec -n 2 mpipar learn ffn"]),
    "four ranks for two": (["pipeline"], 4, ["pipeline needs 2 ranks, but 4 were started"]),
    "words behind an example": (["ffn", "x", "y"], 2, ["x"]),
    "a flag of other commands": (["ffn", "--steps", "3"], 2, ["--steps"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_named(case, tmp_path):
    words, ranks, said = REFUSED[case]
    assert_refused(EXIT_USAGE, said, "learn", *words, ranks=ranks, folder=tmp_path)


def on_two_ranks(folder, *words, code=0):
    """What `mpipar learn` prints on two ranks, in a folder."""
    result = mpipar("learn", *words, ranks=2, cwd=folder).ended(code)
    return result.stdout + result.stderr


def test_an_example_is_printed_once(tmp_path):
    said = on_two_ranks(tmp_path, "ffn")
    assert said.count("ffn: two products cut") == 1
    assert "--- barrier: all_reduce ffn.down, 32 bytes; each rank sends 32" in said
    assert said.rstrip().endswith("no number differs from one rank's by more than 1e-12")
