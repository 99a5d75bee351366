"""Worked examples equal one rank, and code and schedules of readers are judged, on real ranks."""

import pytest
from learn_answers import FILES
from mpi4py import MPI

from mpipar.errors import UsageError
from mpipar.learn import bugs
from mpipar.learn.catalog import EXERCISES
from mpipar.learn.examples.catalog import EXAMPLES, TOLERANCE, run
from mpipar.learn.exercise import Asked
from mpipar.learn.twins import TWINS
from mpipar.pipeline.csv_format import write_csv
from mpipar.pipeline.schedules.catalog import make_schedule

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, 4)
HERE = [name for name, one in EXAMPLES.items() if WORLD.size in one.ranks]


@pytest.mark.parametrize("name", HERE)
def test_an_example_equals_one_rank(name):
    lines, off = run(name, WORLD)
    assert off <= TOLERANCE
    assert bool(lines) == (WORLD.rank == 0)
    if lines:
        assert lines[0].startswith(f"{name}: ")
        assert sum("barrier" in line or "gets" in line for line in lines) > 0


def verdict_on(number, text, folder):
    """The verdict on a file with this text; on world rank 0 it counts."""
    path = folder / "mine.py"
    path.write_text(text)
    return EXERCISES[number].judge(Asked(file=path, world=WORLD))


CODE = [number for number in FILES if WORLD.size in EXERCISES[number].ranks]


@pytest.mark.parametrize("number", CODE)
def test_code_of_a_reader_is_judged(number, tmp_path):
    right, wrong = FILES[number]
    assert verdict_on(number, right, tmp_path).right
    for text, said in wrong:
        found = verdict_on(number, text, tmp_path)
        if WORLD.rank == 0:
            assert not found.right
            assert said in "\n".join(found.lines), found.lines


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("text", "said"), [("return x.no_such", ":2: return x.no"), ("pass", "returns something else")]
)
def test_an_error_in_code_of_a_reader_is_the_readers(text, said, tmp_path):
    rest = FILES["6b"][0].partition("def backward_input")
    text = f"def forward(here, x, w):\n    {text}\n"
    with pytest.raises(UsageError) as caught:
        verdict_on("6b", text + "\n\n" + rest[1] + rest[2], tmp_path)
    assert said in str(caught.value), caught.value


def test_the_engine_runs_a_schedule_of_a_reader(tmp_path):
    number, name = {4: ("5b", "1f1b"), 2: ("10b", "zb-h1")}[WORLD.size]
    write_csv(make_schedule(name, WORLD.size, 8), tmp_path / "my.csv")
    found = EXERCISES[number].judge(Asked(file=tmp_path / "my.csv", world=WORLD))
    assert found.right
    assert "run by the engine" in "\n".join(found.lines)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", TWINS)
def test_a_bug_hunt_shows_what_differs(number):
    lines = bugs.show(TWINS[number], Asked(world=WORLD))
    if WORLD.rank == 0:
        assert "must be" in "\n".join(lines)
        assert not all("none of" in line for line in lines[:3])
