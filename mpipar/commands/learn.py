"""`mpipar learn`: worked examples with real numbers, and exercises whose answers it checks.

A wrong answer ends with exit code 1 (a check that did not hold), an unreadable one with 2.
"""

import hashlib
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError, suggestion
from mpipar.files.bounded import problems_as, read_bytes
from mpipar.files.text import shown
from mpipar.learn.catalog import CHAPTERS, EXERCISES
from mpipar.learn.examples.catalog import EXAMPLES, TOLERANCE
from mpipar.learn.examples.catalog import run as run_example
from mpipar.learn.exercise import Asked, Exercise

WIDTH = 100  # characters per line of text
CHECK = "check"
HANG_SECONDS = 10, 30  # a reader's code may wait forever: when to warn, and when to end the job
EXAMPLES_TYPED = """\
examples:
  mpipar learn                              lists examples and exercises by chapter
  mpiexec -n 2 mpipar learn ffn             shows a worked example on 2 ranks
  mpipar learn check 4a                     shows an exercise
  mpipar learn check 4a 8.3 22              checks an answer
  mpipar learn check 5b --file my.csv       checks a file
  mpiexec -n 2 mpipar learn check 6b --file my_row.py
"""


@dataclass(frozen=True)
class Arguments:
    """What is shown or checked, and the answer."""

    topic: str | None = positional("EXAMPLE", f"{', '.join(EXAMPLES)}; or {CHECK}", default=None)
    words: tuple[str, ...] = positional(
        "EXERCISE ANSWER", "with check: the exercise, and the answer if it is short", default=()
    )
    file: str | None = setting(
        None,
        "the answer, if it is a file. Python code is imported and runs in this process, with"
        " your permissions",
        metavar="FILE",
    )
    seed: int = setting(0, "another trace in 11a and 11c (default 0)")


def run(context: Context) -> int:
    """Print a list, an example, an exercise or a verdict; return the exit code.

    Comm: that of an example, or of what an exercise runs.
    """
    session, args = context.session, context.args
    topic, words = args.topic, args.words
    # What ranks compare once MPI starts. Until then each process reports its own errors.
    facts, session.facts = session.facts, {}
    if args.file and (topic != CHECK or not words):
        raise UsageError(
            f"--file {args.file}: answers an exercise: type mpipar learn {CHECK} ID"
            f" --file {args.file}"
        )
    seeded = [one.id for one in EXERCISES.values() if one.seeded]
    if args.seed and (topic != CHECK or not words or words[0].lower() not in seeded):
        raise UsageError(
            f"--seed {args.seed}: selects another trace in exercise"
            f" {' or '.join(seeded)}; leave it out"
        )
    if topic is None or (topic == CHECK and not words):
        if session.launcher.rank == 0:
            print("\n".join(listing()))
        return EXIT_OK
    if topic == CHECK:
        return check(session, facts, words[0].lower(), words[1:], args)
    if topic in EXAMPLES:
        return example(session, facts, topic, words)
    if topic.lower() in EXERCISES:
        raise UsageError(f"{topic} is an exercise: type mpipar learn {CHECK} {topic}")
    raise UsageError(
        f"{shown(topic)}: no such example{suggestion(topic, [*EXAMPLES, CHECK])}; use"
        f" one of {', '.join(EXAMPLES)}, or {CHECK}"
    )


def listing() -> list[str]:
    """Return the examples and exercises by chapter."""
    lines = []
    for chapter, title in enumerate(CHAPTERS, 1):
        lines += ["", f"{chapter}  {title}"]
        lines += [
            f"  {name:<11} {one.title}" for name, one in EXAMPLES.items() if one.chapter == chapter
        ]
        lines += [
            f"  {one.id:<12}{textwrap.shorten(one.task, WIDTH - 14, placeholder=' ...')}"
            for one in EXERCISES.values()
            if one.chapter == chapter
        ]
    return [
        *lines[1:],
        "",
        "mpiexec -n 2 mpipar learn ffn shows the worked example ffn, with real numbers.",
        "mpipar learn check 4a shows exercise 4a, and how to answer it.",
    ]


def example(session, facts: dict[str, str], name: str, words: tuple[str, ...]) -> int:
    """Run and print a worked example; facts: what ranks compare. Comm: its barriers."""
    one, size = EXAMPLES[name], session.launcher.size
    counts = " or ".join(map(str, one.ranks))
    problems = [f"{name} takes no more arguments: leave {' '.join(words)} out"] if words else []
    if size not in one.ranks:
        problems.append(
            f"{name} needs {counts} ranks, but {size}"
            f" {'was' if size == 1 else 'were'} started: type mpiexec -n"
            f" {one.ranks[0]} mpipar learn {name}"
        )
    if problems:
        raise UsageError(problems)
    session.facts = facts | {"example": name}
    lines, off = run_example(name, session.start())
    if lines:
        print("\n".join(lines))
    return EXIT_OK if off <= TOLERANCE else EXIT_CHECK_FAILED


def check(
    session, facts: dict[str, str], number: str, words: tuple[str, ...], args: Arguments
) -> int:
    """Show an exercise, or judge an answer to it. Comm: that of the exercise."""
    if number not in EXERCISES:
        raise UsageError(
            f"{shown(number)}: no such exercise{suggestion(number, list(EXERCISES))};"
            " mpipar learn lists them"
        )
    one = EXERCISES[number]
    answered = bool(words or args.file)
    on_ranks = session.launcher.size in one.ranks
    problems = misfits(one, words, args.file, session.launcher.size)
    if problems:
        raise UsageError(problems)
    asked = Asked(words, Path(args.file) if args.file else None, args.seed)
    needs = on_ranks and (one.takes_file if answered else one.show is not None)
    if needs:
        session.watch.warn, session.watch.stop = HANG_SECONDS
        session.facts = facts | {"exercise": number, "answer": " ".join(words)}
        if args.file:
            session.facts["file"] = digest(asked.file)
        asked = asked._replace(world=session.start(), agree=session.agree)
    elif session.launcher.rank > 0:
        return EXIT_OK
    if not answered:
        return tell(one, asked)
    return judge(one, asked)


def misfits(one: Exercise, words, file: str | None, size: int) -> list[str]:
    """Return what is wrong with the form of an answer, or with the number of ranks."""
    found = []
    if one.takes_file and words:
        found.append(f"{one.id} is answered with a file: leave {' '.join(words)} out")
    if file and not one.takes_file:
        found.append(f"{one.id} is not answered with a file: type {one.command}")
    if file and one.original and not os.path.exists(file):
        found.append(f"--file {file}: no such file; start from a copy: {one.copying(file)}")
    needs_ranks = file is not None and not one.alone
    if size not in one.ranks and (needs_ranks or (one.ranks and size > 1)):
        counts = " or ".join(map(str, sorted(one.ranks)))
        found.append(
            f"{one.id} runs on {counts} ranks, but {size} {'was' if size == 1 else 'were'}"
            f" started: type {one.launcher}mpipar learn check {one.id}"
            + (f" --file {file}" if file else "")
        )
    return found


def digest(path: Path) -> str:
    """Return what must be the same on all hosts: the contents of the reader's file."""
    with problems_as(UsageError, f"cannot read {path}"):
        return hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def tell(one: Exercise, asked: Asked) -> int:
    """Print an exercise, and how to answer it."""
    lines = one.show(asked) if one.show else []
    if asked.world is not None and asked.world.rank > 0:
        return EXIT_OK
    print(f"{one.id}, of chapter {one.chapter}, {CHAPTERS[one.chapter - 1]}\n")
    print(filled(one.task))
    if lines:
        print("\n" + "\n".join(lines))
    seed = f" --seed {asked.seed}" if asked.seed else ""
    if one.original:
        print(f"\nTo begin: {one.copying(one.answer.split()[-1])}")
    print(f"\nTo answer: {one.command}{seed}")
    return EXIT_OK


def filled(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; commands and flags stay whole. indent: of further lines."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def judge(one: Exercise, asked: Asked) -> int:
    """Print the verdict on an answer. Comm: that of the exercise."""
    speaks = asked.world is None or asked.world.rank == 0
    if asked.file and speaks and asked.file.suffix == ".py":
        print(
            f"{asked.file} is imported and runs in this process, with your permissions",
            file=sys.stderr,
            flush=True,
        )
    verdict = one.judge(asked)
    if not speaks:
        return EXIT_OK
    for line in verdict.lines:
        print(line if "\n" in line else filled(line, "  "))
    print(f"\n{one.id}: {'right' if verdict.right else 'not right'}")
    return EXIT_OK if verdict.right else EXIT_CHECK_FAILED


COMMAND = Command(
    run,
    "[EXAMPLE] | mpipar learn check [EXERCISE [ANSWER]] [--file FILE]",
    Arguments,
    examples=EXAMPLES_TYPED,
    needs_mpi=True,
    is_free=True,
)
