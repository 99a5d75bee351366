"""Errors that a user can cause, and the exit codes of every command.

Each class carries its exit code. An error holds *all* problems found, not only the first, so that a
user who made three mistakes sees three lines at once rather than one line three times. A problem is
one sentence that says what is wrong and what to type instead.
"""

import difflib
from collections.abc import Iterable, Sequence

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_ENVIRONMENT = 69
EXIT_INTERNAL = 70
EXIT_OUTPUT = 74
EXIT_STOPPED = 75
EXIT_HANG = 76
EXIT_NON_FINITE = 79
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141  # as SIGPIPE ends other programs

EXIT_CODES = {
    EXIT_OK: "finished",
    EXIT_CHECK_FAILED: "a check that was asked for did not hold",
    EXIT_USAGE: "wrong flags or configuration",
    EXIT_DATA: "bad data or weights",
    EXIT_ENVIRONMENT: "the environment does not fit (MPI, launcher, GPU, memory)",
    EXIT_INTERNAL: "an exception in a rank: a defect of mpipar",
    EXIT_OUTPUT: "a file could not be written",
    EXIT_STOPPED: "stopped on request, weights written",
    EXIT_HANG: "a hang, or ranks that disagree, or copies of a tensor that do",
    EXIT_NON_FINITE: "a loss or gradient that is not finite",
    EXIT_INTERRUPTED: "interrupted, nothing saved",
    EXIT_NO_READER: "the program that read the output left before its end",
}


class UserError(Exception):
    """A mistake that the user can fix.

    `problems` lists everything that is wrong; `exit_code` is the process's exit code.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        assert self.problems, "an error needs at least one problem"
        super().__init__("\n".join(self.problems))


class UsageError(UserError):
    """Flags, config file or layout that make no sense as typed."""

    exit_code = EXIT_USAGE


class DataError(UserError):
    """Text, token files or weights that cannot be used."""

    exit_code = EXIT_DATA


class EnvironmentProblem(UserError):
    """MPI, launcher or GPU do not fit what was asked for."""

    exit_code = EXIT_ENVIRONMENT


class OutputError(UserError):
    """A file or folder could not be written."""

    exit_code = EXIT_OUTPUT


class HangError(UserError):
    """A rank is stuck, or ranks disagree about what comes next."""

    exit_code = EXIT_HANG


class DriftError(UserError):
    """Copies of a tensor differ that must be bitwise identical."""

    exit_code = EXIT_HANG


class NonFiniteError(UserError):
    """The loss or a gradient is NaN or infinite."""

    exit_code = EXIT_NON_FINITE


def combine(errors: Sequence[UserError]) -> UserError:
    """Return one error with all problems; its class is the one with the lowest exit code.

    Flags come first (2 < 65 < 69 < 74), because what follows from a wrong flag may be wrong too.
    """
    ordered = sorted(errors, key=lambda error: error.exit_code)
    return type(ordered[0])([problem for error in ordered for problem in error.problems])


def broken(*checks: tuple[object, str]) -> list[str]:
    """Return the sentences of the checks (whether something is wrong, what) that are broken."""
    return [sentence for is_broken, sentence in checks if is_broken]


def suggestion(word: str, options: Iterable[str] | dict[str, str]) -> str:
    """Return '; did you mean X?' if an option is close to the word, else ''.

    A dict maps what is compared with the word to what is shown.
    """
    shown = options if isinstance(options, dict) else {option: option for option in options}
    close = difflib.get_close_matches(word, list(shown), n=1)
    return f"; did you mean {shown[close[0]]}?" if close else ""
