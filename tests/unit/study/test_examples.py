"""Worked examples of `mpipar learn`, exercises of the tour, and the library used in examples."""

import io
import re
import sys

import numpy as np
import pytest
from helpers import REPOSITORY, run_command, run_ranks
from in_process import alone, assert_refused, printed
from program import LIMIT, environment
from program import mpipar as start

from mpipar.errors import EXIT_USAGE
from mpipar.pipeline.csv_format import print_csv
from mpipar.pipeline.schedules.catalog import make_schedule
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
    result = start("learn", *words, ranks=2, cwd=folder).ended(code)
    return result.stdout + result.stderr


def test_an_example_is_printed_once(tmp_path):
    said = on_two_ranks(tmp_path, "ffn")
    assert said.count("ffn: two products cut") == 1
    assert "--- barrier: all_reduce ffn.down, 32 bytes; each rank sends 32" in said
    assert said.rstrip().endswith("no number differs from one rank's by more than 1e-12")


# --- the exercises of the tour: their tests pass with right answers and fail with wrong ones


FOLDER = REPOSITORY / "docs" / "examples" / "exercises"
RING = """
def all_reduce(comm, x):
    pieces = x.reshape(comm.size, -1)
    for step in range(2 * (comm.size - 1)):
        adds = step < comm.size - 1
        out, into = comm.neighbor(-step), comm.neighbor(-step - 1)
        came = pieces[into].copy()
        arriving = comm.irecv(came, comm.neighbor(-1), 0, "ring")
        leaving = comm.isend(pieces[out].copy(), comm.neighbor(1), 0, "ring")
        arriving.wait()
        leaving.wait()
        pieces[into] = pieces[into] + came if adds else came
"""
EVERYBODY_TO_EVERYBODY = """
def all_reduce(comm, x):
    own = x.copy()
    for step in range(1, comm.size):
        came = own.copy()
        arriving = comm.irecv(came, comm.neighbor(-step), 0, "all")
        leaving = comm.isend(own, comm.neighbor(step), 0, "all")
        arriving.wait()
        leaving.wait()
        x += came
"""
ROW = """
def forward(comm, x, w):
    return comm.all_reduce(x @ w, "row")


def backward_input(comm, dy, w):
    return dy @ w.T


def backward_weight(comm, x, dy, dw):
    dw += x.T @ dy
"""
LOSS = """
def losses(comm, logits, targets, start):
    top = logits.max(axis=1)
    mine = (targets >= start) & (targets < start + logits.shape[1])
    where = np.flatnonzero(mine), (targets - start)[mine]
    goal = np.zeros(len(targets))
    goal[where[0]] = logits[where]
    stats = np.stack([top, np.exp(logits - top[:, None]).sum(axis=1), goal])
    tops, sums, goals = np.moveaxis(comm.all_gather(stats, "loss"), 1, 0)
    most = tops.max(axis=0)
    total = (sums * np.exp(tops - most)).sum(axis=0)
    dlogits = np.exp(logits - most[:, None]) / total[:, None]
    dlogits[where] -= 1
    return most + np.log(total) - goals.sum(axis=0), dlogits
"""


def schedule(name, pp):
    """A right answer to an exercise on schedules, as `mpipar schedule --csv` prints it."""
    text = io.StringIO()
    print_csv(make_schedule(name, pp, 8), text)
    return f"\ndef lines():\n    return {text.getvalue().split()!r}\n"


RIGHT = {
    "weight_gradient": "\ndef backward_weight(x, dy, dw):\n    dw += x.T @ dy\n",
    "ring_all_reduce": RING,
    "row_cut": ROW,
    "vocabulary_loss": LOSS,
    "one_f_one_b": schedule("1f1b", 4),
    "zero_bubble": schedule("zb-h1", 2),
}
WRONG = {
    "weight_gradient": RIGHT["weight_gradient"].replace("+=", "[:] ="),
    "ring_all_reduce": EVERYBODY_TO_EVERYBODY,
    "row_cut": ROW.replace('comm.all_reduce(x @ w, "row")', "x @ w"),
    "vocabulary_loss": LOSS.replace('comm.all_gather(stats, "loss")', "stats[None]"),
    "one_f_one_b": schedule("gpipe", 4),
    "zero_bubble": schedule("1f1b", 2),
}


def judged(answers, folder):
    """How the exercises' own tests end on four ranks, with these answers below the blanks."""
    for name, answer in answers.items():
        text = (FOLDER / f"{name}.py").read_text()
        assert "...  # your code" in text
        (folder / f"{name}.py").write_text(text + answer)
    files = [f"{name}.py" for name in answers]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    return run_ranks(4, command, LIMIT, environment(), cwd=folder)


def test_every_exercise_has_answers_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == RIGHT.keys() == WRONG.keys()


def test_right_answers_pass(tmp_path):
    result = judged(RIGHT, tmp_path)
    assert result.returncode == 0, result.tail()
    assert result.stdout.count(f"{len(RIGHT)} passed") == 4


@pytest.mark.slow
@pytest.mark.parametrize("answers", [WRONG, dict.fromkeys(WRONG, "")], ids=["wrong", "blank"])
def test_other_answers_fail(answers, tmp_path):
    result = judged(answers, tmp_path)
    assert result.stdout.count(f"{len(WRONG)} failed") == 4, result.tail()


# --- the library that `import mpipar` gives, used as docs/examples uses it


DOCS = REPOSITORY / "docs" / "examples"
PLANTED = """
import runpy
from mpipar.comm.group import Comm
Comm.all_reduce = lambda self, x, name, op="sum": x
runpy.run_path({!r})
"""


def test_importing_the_package_loads_neither_numpy_nor_mpi():
    code = ("import sys, mpipar\n"
            "assert set(mpipar.__all__) == set(mpipar.LIBRARY)\n"
            "loaded = {name.split('.')[0] for name in sys.modules} & {'numpy', 'mpi4py'}\n"
            "assert not loaded, loaded\n"
            "from mpipar import *\n"
            "assert 'numpy' in sys.modules and 'mpi4py.MPI' not in sys.modules\n"
            "print(RowLinear.__name__, Grid.__name__, sorted(CUTS)[0])\n")  # fmt: skip
    result = run_command([sys.executable, "-c", code], LIMIT, environment())
    assert result.returncode == 0, result.tail()
    assert result.stdout == "RowLinear Grid column\n"


def largest_difference(result) -> float:
    found = re.search(r"largest difference from one rank: (\S+)\n", result.stdout)
    assert result.returncode == 0, result.tail()
    assert found, result.tail()
    return float(found[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_cut_mlp_of_the_docs_equals_the_whole_one(ranks):
    """23 channels are padded on three ranks."""
    result = run_ranks(ranks, [sys.executable, str(DOCS / "cut_mlp.py")], LIMIT, environment())
    assert largest_difference(result) <= 1e-12
    barriers = {line for line in result.stdout.splitlines() if line.startswith("all_reduce")}
    assert barriers == (
        {f"all_reduce of mlp.{name} over tp" for name in ("up", "down")} if ranks > 1 else set()
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_convolutions_of_the_docs_equal_those_of_one_rank(ranks):
    """2 images of 5 x 4 places and 3 channels; 10 channels between are padded on four ranks."""
    program = [sys.executable, str(DOCS / "convolution.py")]
    result = run_ranks(ranks, program, LIMIT, environment())
    assert largest_difference(result) <= 1e-12
    image = 2 * 5 * 4 * 3 * 8  # bytes
    expected = [
        f"all_reduce of conv.down over tp, {image} bytes",
        f"all_reduce of conv.up over tp, {3 * 3 * image} bytes",
    ]
    assert result.stdout.splitlines()[1:] == (expected if ranks > 1 else [])


@pytest.mark.parametrize("name", ["cut_mlp.py", "convolution.py"])
def test_an_example_without_its_sums_is_caught(name):
    program = [sys.executable, "-c", PLANTED.format(str(DOCS / name))]
    assert largest_difference(run_ranks(2, program, LIMIT, environment())) > 1e-3


# --- one_file.py, which gives the losses of `mpipar train` on every layout


ONE_FILE = REPOSITORY / "docs" / "examples" / "one_file.py"
STEPS = 3
COMMON = """--dtype float64 --batch-size 16 --num-microbatches 4 --lr-schedule constant --lr 1e-3
    --clip 0 --eval-tokens 64 --sample-tokens 0""".split()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(a file of weights that have been trained for a step, the package's run from there)."""
    first, second = (tmp_path_factory.mktemp("one_file") / name for name in ("first", "second"))
    weights = first / "weights"
    alone("train", "--out", first, *COMMON, "--steps", 1).ended()
    alone("train", "--out", second, *COMMON, "--steps", STEPS, "--init-from", weights).ended()
    return weights / "model.safetensors", second


@pytest.mark.parametrize(("layout", "ranks"), [
    ("1,1,1", 1), ("1,2,2", 4),
    pytest.param("1,2,1", 2, marks=pytest.mark.slow),
    pytest.param("2,1,2", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_losses_of_one_file_are_those_of_the_package(layout, ranks, reference):
    weights, run = reference
    program = [ONE_FILE, "--layout", layout, "--weights", weights, "--compare", run]
    command = [sys.executable, *map(str, program)]
    done = run_ranks(ranks, command, LIMIT, environment()).ended()
    found = re.findall(r"^step +\d+  loss (\S+)  mpipar (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == STEPS
    ours, theirs = np.array(found, float).T
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0)
