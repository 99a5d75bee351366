"""`mpipar learn`: each exercise tells right answers from wrong ones, and mistakes are named."""

import re
import shlex
import subprocess

import pytest
from english import clumsy_words, page_paragraphs
from in_process import assert_refused, printed
from learn_answers import FILES, LAYOUTS, LINEAR, LINEAR_FILES, NUMBERS
from program import mpipar

from mpipar.errors import EXIT_CHECK_FAILED, EXIT_USAGE
from mpipar.learn.catalog import CHAPTERS, EXERCISES
from mpipar.learn.examples.catalog import EXAMPLES
from mpipar.learn.exercise import PROGRAM
from mpipar.learn.lateness import CAUSES, SHAPES, late_rank, pipeline_run
from mpipar.learn.twins import TWINS, by_letter
from mpipar.pipeline.csv_format import write_csv
from mpipar.pipeline.schedules.catalog import make_schedule

SCHEDULES = {"5b": (4, "1f1b", "gpipe"), "10b": (2, "zb-h1", "1f1b")}


def check(number, *words, code=0):
    return printed("learn", "check", number, *words, code=code)


def test_every_exercise_has_answers_here():
    made = {"11a", "11c", "2c", *SCHEDULES}
    assert EXERCISES.keys() == NUMBERS.keys() | LAYOUTS.keys() | FILES.keys() | TWINS.keys() | made
    assert {one.chapter for one in EXERCISES.values()} == set(range(1, len(CHAPTERS) + 1))
    assert list(EXERCISES)[:3] == ["1a", "1b", "2a"]
    assert list(EXERCISES)[-1] == "17c"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_right_number_is_right_and_a_wrong_one_wrong(number):
    words = NUMBERS[number].replace(" %", "%").split()
    said = check(number, *words)
    assert said.count("-> right") == len(words)
    assert "why: " in said
    assert said.endswith(f"{number}: right\n")
    wrong = [*words[:-1], "dp" if number == "9b" else "977"]
    said = check(number, *wrong, code=EXIT_CHECK_FAILED)
    assert said.count("WRONG") == 1
    assert "why: " in said
    assert said.endswith(f"{number}: not right\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", LAYOUTS)
def test_a_layout_fits_or_does_not(number):
    fits, too_large = LAYOUTS[number]
    assert "it fits" in check(number, fits)
    assert "it cannot start" in check(number, too_large, code=EXIT_CHECK_FAILED)


@pytest.mark.parametrize("number", SCHEDULES)
def test_a_schedule_is_proved_and_timed(number, tmp_path):
    p, right, wrong = SCHEDULES[number]
    path = tmp_path / "my.csv"
    write_csv(make_schedule(right, p, 8), path)
    assert f"mpiexec -n {p} mpipar learn check" in check(number, "--file", path)
    write_csv(make_schedule(wrong, p, 8), path)
    assert "WRONG" in check(number, "--file", path, code=EXIT_CHECK_FAILED)
    write_csv(make_schedule(right, p, 4), path)
    assert "microbatches: 4, asked for 8 -> WRONG" in check(
        number, "--file", path, code=EXIT_CHECK_FAILED
    )
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert "needs 1F0, which stands at" in check(number, "--file", path, code=EXIT_CHECK_FAILED)
    path.write_text("0F0,what\n")
    assert_refused(EXIT_USAGE, ["is not an instruction"], "learn", "check", number, "--file", path)


@pytest.mark.parametrize("number", [one.id for one in EXERCISES.values() if one.original])
def test_an_exercise_prints_the_command_that_its_file_begins_with(number, tmp_path):
    (begin,) = (line for line in check(number).splitlines() if line.startswith("To begin: "))
    subprocess.run(shlex.split(begin.partition(": ")[2]), cwd=tmp_path, check=True)
    (copy,) = tmp_path.iterdir()
    assert EXERCISES[number].command.endswith(f"--file {copy.name}")
    assert copy.read_text() == (PROGRAM / EXERCISES[number].original).read_text()


def test_a_weight_gradient_is_judged_by_finite_differences(tmp_path, capsys):
    path = tmp_path / "my_linear.py"
    path.write_text(LINEAR)
    said = check("2c", "--file", path)
    assert "my_linear.py is imported and runs in this process" in capsys.readouterr().err
    assert "20 of 20 numbers of dw are right" in said
    for text, words in LINEAR_FILES:
        path.write_text(text)
        assert words in check("2c", "--file", path, code=EXIT_CHECK_FAILED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def backward_weight(:\n", ["my.py:1: invalid syntax"]),
        ("x = 1\ny = x / 0\n", ["my.py:2: y = x / 0: ZeroDivisionError"]),
        ("raise SystemExit(3)\n", ["my.py:1: raise SystemExit(3)"]),
        ("backward_weight = 3\n", ["defines no backward_weight"]),
        (LINEAR.replace("dw +=", "dw = dw + x +"), ["my.py:2: ", "ValueError"]),
    ],
)
def test_errors_of_a_readers_file_are_shown_with_their_line(tmp_path, text, said):
    (tmp_path / "my.py").write_text(text)
    assert_refused(EXIT_USAGE, said, "learn", "check", "2c", "--file", tmp_path / "my.py")


@pytest.mark.parametrize("seed", range(4))
def test_a_made_trace_has_the_truth_that_is_planted(seed):
    """The findings of `mpipar trace` name it too."""
    planted = late_rank(seed)
    place, cause = planted.truth
    (finding,) = planted.analysis.findings
    assert re.search(rf"\brank {place}\b", finding.text)
    assert check("11a", place, cause, "--seed", seed).endswith("11a: right\n")
    other = next(one for one in CAUSES if one != cause)
    assert "WRONG" in check("11a", place, other, "--seed", seed, code=EXIT_CHECK_FAILED)
    (truth,) = pipeline_run(seed).truth
    assert check("11c", truth, "--seed", seed).endswith("11c: right\n")
    other = next(one for one in SHAPES if one != truth)
    assert "WRONG" in check("11c", other, "--seed", seed, code=EXIT_CHECK_FAILED)


def test_every_shape_of_a_pipeline_can_be_told():
    found = [pipeline_run(seed) for seed in range(9)]
    kinds = {one.truth[0]: [finding.kind for finding in one.analysis.findings] for one in found}
    assert kinds == {
        "uneven": ["uneven stage"],
        "head": ["heavy head"],
        "link": ["slow link"],
        "schedule": ["one active rank"],
        "nothing": [],
    }


def test_a_trace_is_shown_with_the_exercise():
    said = check("11a", "--seed", "2")
    assert "o optimizer, d data" in said
    assert "mostly waited for" in said
    assert said.endswith("check 11a RANK data|forward|backward|optimizer|gc --seed 2\n")
    assert said != check("11a")


@pytest.mark.parametrize("number", TWINS)
def test_a_bug_hunt_has_one_right_letter(number):
    letters = by_letter()
    right = next(letter for letter, one in letters.items() if one == number)
    said = check(number, right)
    assert TWINS[number].cause in said.replace("\n  ", " ")
    assert f"def {TWINS[number].plant.__name__}(" in said
    assert "WRONG" in check(number, "a" if right != "a" else "b", code=EXIT_CHECK_FAILED)


def test_examples_and_exercises_are_listed():
    said = printed("learn")
    assert printed("learn", "check") == said
    for name in [*EXAMPLES, *EXERCISES, *CHAPTERS]:
        assert name in said
    assert printed("learn", "check", ranks=2, rank=1) == ""


@pytest.mark.parametrize("number", [one.id for one in EXERCISES.values() if not one.show])
def test_an_exercise_says_how_it_is_answered(number):
    assert EXERCISES[number].command in check(number).replace("\n", " ")


def test_tasks_are_plain_english():
    found = [
        problem for one in EXERCISES.values() for problem in clumsy_words(page_paragraphs(one.task))
    ]
    assert not found, "\n".join(found)


REFUSED = {
    "no layout": (["check", "15b", ""], ["the answer has no layout"]),
    "help in an answer": (["check", "15b", "pp=4 --help"], ["--help: unknown flag"]),
    "no such topic": (["rign"], ["'rign': no such example", "did you mean ring?"]),
    "an exercise as topic": (["4a"], ["type mpipar learn check 4a"]),
    "a file for no exercise": (["--file", "x.py"], ["--file x.py: answers an exercise: type"]),
    "a file for an example": (["ring", "--file", "x.py"], ["--file x.py: answers an exercise"]),
    "no such exercise": (["check", "4z"], ["no such exercise", "mpipar learn lists them"]),
    "one rank for an example": (["ffn"], ["2 or 4 ranks, but 1 was", "mpiexec -n 2 mpipar learn"]),
    "words behind an example": (["ffn", "x", "y"], ["leave x y out"]),
    "no number": (["check", "4a", "many", "22"], ["'many' is not a number such as 12"]),
    "a decimal comma": (["check", "4a", "8,3", "22"], ["'8,3' is not a number such as 12, 8.3"]),
    "too few numbers": (["check", "4a", "8.3"], ["1 word given: type 2, BUSY MESSAGES"]),
    "a huge number": (["check", "5a", "1e999999999"], ["is not a number"]),
    "a division by zero": (["check", "5a", "1/0"], ["is not a number"]),
    "no word of the list": (["check", "9b", "cp"], ["type one of dp, pp, tp"]),
    "no letter": (["check", "6c", "m"], ["type one of a, b, c"]),
    "a file where words are asked for": (
        ["check", "4a", "--file", "x"],
        ["not answered with a file"],
    ),
    "words where a file is asked for": (["check", "5b", "33"], ["answered with a", "leave 33"]),
    "no file": (["check", "5b", "--file", "none.csv"], ["cannot read none.csv", "No such file"]),
    "no file, of a copy": (
        ["check", "2c", "--file", "my file.py"],
        [
            "--file my file.py: no such file; start from a copy: cp",
            "mpipar/partition/column.py 'my file.py'",
        ],
    ),
    "code without ranks": (
        ["check", "6b", "--file", "x.py"],
        ["6b runs on 2 ranks, but 1 was started", "mpiexec -n 2 mpipar learn check 6b --file x.py"],
    ),
    "a wrong rank and cause": (["check", "11a", "9", "sleep"], ["'9': not a rank", "not a cause"]),
    "a layout of other size": (["check", "15c", "tp=4"], ["has 4 ranks, but there are 8 devices"]),
    "a layout that is none": (["check", "15c", "tp=x"], ["'tp=x' is not understood"]),
    "a flag that is none": (["check", "15c", "tp=8 --fast"], ["--fast"]),
    "a quote that is open": (["check", "15c", "tp='8"], ["cannot be read"]),
    "a seed of no trace": (
        ["check", "4a", "8.3", "22", "--seed", "3"],
        ["--seed 3: selects another trace in exercise 11a or 11c; leave it out"],
    ),
    "a flag of other commands": (["ffn", "--steps", "3"], ["--steps"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_named(case, tmp_path):
    words, said = REFUSED[case]
    assert_refused(EXIT_USAGE, said, "learn", *words, folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (["pipeline"], 4, "pipeline needs 2 ranks, but 4 were started"),
        (["check", "6c"], 4, "6c runs on 2 ranks, but 4 were started"),
        (["check", "3c", "--file", "x.py"], 3, "3c runs on 4 ranks, but 3 were started"),
    ],
)
def test_a_wrong_number_of_ranks_is_named(words, ranks, said, tmp_path):
    assert_refused(EXIT_USAGE, [said], "learn", *words, ranks=ranks, folder=tmp_path)


def on_two_ranks(folder, *words, code=0):
    """What `mpipar learn` prints on two ranks, in a folder."""
    result = mpipar("learn", *words, ranks=2, cwd=folder).ended(code)
    return result.stdout + result.stderr


def test_an_example_is_printed_once(tmp_path):
    said = on_two_ranks(tmp_path, "ffn")
    assert said.count("ffn: two products cut") == 1
    assert "--- barrier: all_reduce ffn.down, 32 bytes; each rank sends 32" in said
    assert said.rstrip().endswith("no number differs from one rank's by more than 1e-12")


@pytest.mark.slow
def test_code_of_a_reader_runs_on_ranks(tmp_path):
    path = tmp_path / "my_row.py"
    words = ("check", "6b", "--file", path.name)
    right, wrong = FILES["6b"]
    path.write_text(right)
    assert "6b: right" in on_two_ranks(tmp_path, *words)
    path.write_text(wrong[0][0])
    assert "the sum is missing" in on_two_ranks(tmp_path, *words, code=EXIT_CHECK_FAILED)
    head = right[: right.index("def forward")]
    path.write_text(
        head + "def forward(*_, **__):\n    return 1 / 0\n" + right[right.index("def backward") :]
    )
    said = on_two_ranks(tmp_path, *words, code=EXIT_USAGE)
    line = head.count("\n") + 2
    assert f"my_row.py:{line}: return 1 / 0: ZeroDivisionError" in said
