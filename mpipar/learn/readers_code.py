"""Exercises whose answer is code: the reader's functions replace those of the program.

The reader's own Python file is imported here, and its errors are shown with their line. It runs in
this process, with the rights of whoever started it, as any Python program does. It runs under the
job's guard: whatever it does wrong ends all ranks, and none is left waiting.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.facts import gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import POINT_TO_POINT, Recorder, family, wire_bytes
from mpipar.errors import UsageError, UserError
from mpipar.files.bounded import problems_as, read_text
from mpipar.layers.loss import CrossEntropy
from mpipar.learn import small_model
from mpipar.learn.exercise import Asked, Exercise, Verdict
from mpipar.learn.replaced import replaced
from mpipar.partition import Here, Sizes, row

CUT = ("forward", "backward_input", "backward_weight")
MOST = 5  # tensors that are named
NUMBERS = 12  # per rank of the group, in each rank's array of 3c


def exercises() -> list[Exercise]:
    """Return all exercises of this kind."""
    return [
        Exercise(
            "2c",
            "Write the weight gradient of a product: copy `mpipar/partition/column.py`"
            " to `my_linear.py`, empty its `backward_weight`, and fill it using only NumPy."
            " x is (3, 4), dy is (3, 5), and the result is added to dw (4, 5)."
            " Finite differences judge it.",
            "--file my_linear.py",
            judge_weight_gradient,
            original="mpipar/partition/column.py",
        ),
        Exercise(
            "3c",
            "Write `all_reduce(comm, x)`: afterwards x holds the sum of all ranks' x. Use"
            " `comm.isend(x, peer, tag, name)`, `comm.irecv(x, peer, tag, name)` and `.wait()`"
            " alone, with `comm.index`, `comm.size` and `comm.neighbor(steps)`. Send no more bytes"
            " than a ring does: 2(q-1)/q of x on each of q ranks.",
            "--file my_ring.py",
            judge_all_reduce,
            ranks=(4,),
            alone=False,
        ),
        in_a_step(
            "6b",
            "Write the row cut: copy `mpipar/partition/row.py` to `my_row.py`, empty its"
            " three functions, and fill them. A step with tp=2 must equal one rank.",
            "my_row.py",
            row,
            CUT,
            "mpipar/partition/row.py",
        ),
        in_a_step(
            "7d",
            "Write the loss over a cut vocabulary: copy `mpipar/layers/loss.py` to"
            " `my_loss.py`, and empty `forward` and `backward_input` of its class `CrossEntropy`."
            " Fill them using NumPy. No rank may send its logits.",
            "my_loss.py",
            CrossEntropy,
            ("forward", "backward_input"),
            "mpipar/layers/loss.py",
        ),
    ]


def in_a_step(
    number: str, task: str, file: str, owner, names: tuple[str, ...], original: str
) -> Exercise:
    """Return an exercise whose functions replace those of a module or class in a step with tp=2.

    file: the name of the reader's file. original: the program's file, of which it is a copy.
    """
    inside = owner.__name__ if isinstance(owner, type) else None

    def judge(asked: Asked) -> Verdict:
        functions = asked.agree(lambda: load(asked.file, names, inside))
        config = small_model.small_config({"tp": 2})
        expected = small_model.expected_tensors(config, asked.world)
        usual = small_model.step_beside(config, asked.world, expected)
        with blamed(asked.file), replaced(owner, **functions):
            found = small_model.step_beside(config, asked.world, expected)
        return Verdict(
            not found.wrong and not sends_more(found, usual), described(found, usual, original)
        )

    return Exercise(
        number, task, f"--file {file}", judge, ranks=(2,), alone=False, original=original
    )


def described(found, usual, original: str) -> list[str]:
    """Return what differs from one rank, and from the barriers of the program."""
    total, wrong = len(found.differences), found.wrong
    lines = [f"{total - len(wrong)} of {total} tensors equal those of one rank"]
    gradients = [one for one in wrong if one.kind == "gradient"] or wrong
    lines += [small_model.in_words(one) for one in small_model.worst_first(gradients)[:MOST]]
    missing = barrier_lines(found, usual, original)
    if wrong and not missing:
        missing = [f"the barriers match those of {original}: look at what is computed between them"]
    lines += missing
    counts = ", ".join(
        f"{operation} {name} in {phase}" for phase, name, operation in sorted(calls(usual))
    )
    return [
        *lines,
        (f"why: {original} gives the same on 2 ranks as on one, with these barriers: {counts}"),
    ]


def calls(outcome) -> Counter:
    """Return {(phase, name without numbers, operation): count} over the tensor-parallel group."""
    return Counter(
        (one.phase, family(one.name), one.operation)
        for one in outcome.recorder.records
        if one.axis == "tp"
    )


def barrier_lines(found, usual, original: str) -> list[str]:
    """Return a sentence for each barrier that occurs less or more often than it must."""
    mine, right = calls(found), calls(usual)
    lines = []
    for key in sorted(mine.keys() | right.keys()):
        if mine[key] == right[key]:
            continue
        phase, name, operation = key
        summed = operation in ("all_reduce", "reduce_scatter")
        less = "the sum is missing" if summed else "the other ranks' parts are missing"
        more = "a complete sum is summed again" if summed else "the other ranks have it already"
        lines.append(
            f"{operation} {name} in {phase}: {mine[key]} times, and {right[key]} in"
            f" {original}: {less if mine[key] < right[key] else more}"
        )
    return lines


def sends_more(found, usual) -> bool:
    """Return whether the reader's code sends more bytes than the program's."""
    mine, right = (
        sum(one.wire_bytes for one in outcome.recorder.records) for outcome in (found, usual)
    )
    return mine > right


def judge_weight_gradient(asked: Asked) -> Verdict:
    """Judge dw by finite differences of sum(dy * (x w)), which are exact: it is linear in w."""
    function = asked.agree(lambda: load(asked.file, ("backward_weight",)))
    random = np.random.default_rng(2)
    x, dy, before = (
        random.integers(-3, 4, shape).astype(float) for shape in ((3, 4), (3, 5), (4, 5))
    )
    dw = before.copy()
    ops = ops_module.make("cpu", "float64")
    with blamed(asked.file):
        function["backward_weight"](
            Here(ops, ops, Comms.solo(ops)["tp"], "learn", Sizes(0, 4, 5)), x.copy(), dy.copy(), dw
        )
    expected = finite_differences(x, dy)
    wrong = np.argwhere(~np.isclose(dw - before, expected, rtol=0, atol=1e-9))
    lines = [f"{expected.size - len(wrong)} of {expected.size} numbers of dw are right"]
    if len(wrong):
        i, j = wrong[0]
        lines.append(
            f"dw[{i},{j}] grew by {dw[i, j] - before[i, j]:g}, but must grow by {expected[i, j]:g}"
        )
        if np.allclose(dw, expected):
            lines.append("it was overwritten: each microbatch adds its own part to dw")
        elif np.allclose(dw, before):
            lines.append("dw is unchanged: write into the array itself, as in dw += ...")
    lines.append(
        "why: w[i,j] reaches y[t,j] with the factor x[t,i], so dw[i,j] is the sum over"
        " tokens of x[t,i] dy[t,j], which is x^T dy"
    )
    return Verdict(not len(wrong), lines)


def finite_differences(x, dy) -> np.ndarray:
    """Return by how much sum(dy * (x w)) grows when one number of w grows by 1."""
    found = np.empty((x.shape[1], dy.shape[1]))
    for i, j in np.ndindex(found.shape):
        w = np.zeros(found.shape)
        w[i, j] = 1.0
        found[i, j] = np.sum(dy * (x @ w))
    return found


def judge_all_reduce(asked: Asked) -> Verdict:
    """Judge the reader's sum over all ranks, its bytes and its operations.

    Comm: what the reader's function sends, one all_reduce, one gather.
    """
    function: FunctionType = asked.agree(lambda: load(asked.file, ("all_reduce",)))["all_reduce"]
    world, recorder = asked.world, Recorder()
    ops = ops_module.make("cpu", "float64")
    comms = Comms(Grid(world.rank, {"tp": world.size}), ops, recorder, world)
    comm = comms["tp"]
    x = np.arange(1.0, NUMBERS * world.size + 1) * 10.0**world.rank
    expected = x.copy()
    with blamed(asked.file):
        function(comm, x)
    records = list(recorder.records)
    comm.all_reduce(expected, "learn.expected")
    others = sorted({one.operation for one in records} - set(POINT_TO_POINT))
    wrong = np.flatnonzero(x != expected)
    first = [int(wrong[0]), float(x[wrong[0]]), float(expected[wrong[0]])] if len(wrong) else None
    facts = gather_facts(
        world, {"first": first, "others": others, "sent": sum(one.wire_bytes for one in records)}
    )
    comms.close()
    if world.rank:
        return Verdict(True, [])
    return sum_verdict(facts, wire_bytes("all_reduce", x.nbytes, world.size), x.nbytes)


def sum_verdict(facts: list[dict], most: int, nbytes: int) -> Verdict:
    """Return the verdict on what all ranks have found."""
    lines, right = [], True
    for place, fact in enumerate(facts):
        if fact["first"]:
            at, is_, must = fact["first"]
            lines.append(f"rank {place}: x[{at}] is {is_:g}, but must be {must:g} -> WRONG")
        if fact["others"]:
            lines.append(
                f"rank {place}: {', '.join(fact['others'])}: use only isend and irecv -> WRONG"
            )
        if fact["sent"] > most:
            lines.append(
                f"rank {place}: sends {fact['sent']:,} bytes, but a ring {most:,} -> WRONG"
            )
        right = right and not (fact["first"] or fact["others"] or fact["sent"] > most)
    if right:
        lines.append(
            f"all {len(facts)} ranks hold the sum, and none sends more than {most:,} bytes -> right"
        )
    return Verdict(
        right,
        [
            *lines,
            (
                f"why: x has {nbytes:,} bytes. A ring sums each of q pieces while it travels round,"
                " and brings it to all in a second round: 2(q-1) pieces from each rank"
            ),
        ],
    )


def load(path: Path, names: tuple[str, ...], inside: str | None = None) -> dict[str, object]:
    """Load the functions of these names from a file; UsageError says what is wrong with it.

    inside: a class of the file that has them as methods.
    """
    with problems_as(UsageError, f"cannot read {path}"):
        text = read_text(path)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    with blamed(path):
        exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 (asked for)
    place, home = vars(module), str(path)
    if inside is not None:
        found = place.get(inside)
        if not isinstance(found, type):
            raise UsageError(f"{path}: defines no class {inside}")
        place, home = vars(found), f"{path}, class {inside}"
    missing = [name for name in names if not isinstance(place.get(name), FunctionType)]
    if missing:
        raise UsageError(
            f"{home}: defines no {' and no '.join(missing)}; functions of these names"
            f" are needed: {', '.join(names)}"
        )
    return {name: place[name] for name in names}


@contextlib.contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Turn errors that are no UserError into one that names the reader's file and line.

    Only the reader's code differs from the tested program, so the error is the reader's.
    """
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UsageError(
            f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(place_of(error, path)) from error


def place_of(error: BaseException, path: Path) -> list[str]:
    """Return an error in words: the last line of the file that was running, and what happened."""
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    if own:
        return [f"{path}:{own[-1].lineno}: {own[-1].line}: {what}"]
    return [
        f"with {path} in place, the step fails after its functions:  {what}",
        "one of them returns something else than the function that it replaces",
    ]
