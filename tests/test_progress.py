"""The terminal line that rewrites itself: what the screen shows, and that nothing is mangled."""

import errno
import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import termios
import threading

import pytest
from helpers import find_launcher
from program import LIMIT, PROGRAM, environment
from test_resume_runs import TINY, here

from mpipar.console import progress
from mpipar.console.output import warn
from mpipar.console.progress import StatusLine, status_line

__all__ = ["here"]  # the fixture


def screen(text):
    """The lines that a terminal shows after a text; it knows line feeds, returns and ESC [ K."""
    lines, column = [""], 0
    for piece in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", text):
        if piece == "\n":
            lines.append("")
            column = 0
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + piece + lines[-1][column + len(piece) :]
            column += len(piece)
    return lines


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """From its call on, standard output and error are one terminal; no update is left out."""

    def start():  # not before: pytest sets both streams at the start of a test
        made = Terminal()
        monkeypatch.setattr("sys.stdout", made)
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(progress, "EVERY_SECONDS", 0)
        return made

    return start


def test_what_else_is_printed_stands_above_the_line(open_terminal):
    terminal = open_terminal()
    with status_line(None) as line:
        line.show("step 1 | a long line at first")
        print("a text")
        line.show("step 2")
        assert screen(terminal.getvalue()) == ["a text", "step 2"]
        warn("the disk is full")
        line.show("step 3")
        assert screen(terminal.getvalue())[1:] == ["mpipar: warning: the disk is full", "step 3"]
    assert screen(terminal.getvalue())[-1] == ""
    print("after it")
    assert screen(terminal.getvalue()) == [
        "a text",
        "mpipar: warning: the disk is full",
        "after it",
        "",
    ]


def test_the_emulator_sees_a_mangled_line(open_terminal):
    """The twin: without erasing, the end of the longer line stays."""
    terminal = open_terminal()
    line = StatusLine(terminal)
    line.show("step 1 | a long line")
    terminal.write("\rshort\n")
    assert screen(terminal.getvalue())[0] == "short1 | a long line"


def test_a_text_without_its_end_is_not_written_over(open_terminal):
    terminal = open_terminal()
    with status_line("line") as line:
        print("no end", end="")
        line.show("step 1")
        print(", and now")
        assert screen(terminal.getvalue()) == ["no end, and now", ""]


def test_threads_do_not_mix_their_texts(open_terminal):
    """Steps in one thread, warnings in three others: each line is whole."""
    terminal = open_terminal()
    with status_line("line") as line:

        def warns(name):
            for number in range(50):
                warn(f"{name} {number}")

        threads = [threading.Thread(target=warns, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for step in range(200):
            line.show(f"step {step} | some more text")
        for thread in threads:
            thread.join()
    found = screen(terminal.getvalue())
    assert sorted(filter(None, found)) == sorted(
        f"mpipar: warning: {name} {number}" for name in "abc" for number in range(50)
    )


def test_the_line_is_cut_to_the_terminal(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(progress, "width", lambda stream: 10)
    with status_line("line") as line:
        line.show("123456789012345")
        assert screen(terminal.getvalue()) == ["123456789"]


def test_it_is_not_written_more_often_than_a_person_reads(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(progress, "EVERY_SECONDS", 60)
    with status_line("line") as line:
        line.show("first")
        line.show("second")
        assert screen(terminal.getvalue()) == ["first"]


@pytest.mark.parametrize(
    ("wanted", "term", "isatty", "taken"),
    [
        (None, "xterm", True, True),
        (None, "dumb", True, False),
        (None, "xterm", False, False),
        ("plain", "xterm", True, False),
        ("line", "dumb", False, True),
    ],
)
def test_when_it_is_taken(wanted, term, isatty, taken, open_terminal, monkeypatch):
    open_terminal()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(Terminal, "isatty", lambda self: isatty)
    with status_line(wanted) as line:
        assert (line is not None) == taken


def test_a_terminal_that_is_gone_ends_nothing(open_terminal, monkeypatch):
    def gone(self, text):
        raise OSError(errno.EIO, "Input/output error")

    open_terminal()
    with status_line("line") as line:
        line.show("step 1")
        monkeypatch.setattr(Terminal, "write", gone)
        line.show("step 2")
        line.erase()
        assert (line.next, line.shown) == (math.inf, False)


# --- a run in a pseudo-terminal


def in_terminal(argv, folder, columns=80):
    """What a program writes to a terminal of so many columns, as text; it must end with 0."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [*map(str, argv)],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=folder,
        env=environment() | {"TERM": "xterm"},
    )
    os.close(its)
    timer, found = threading.Timer(LIMIT, process.kill), b""
    timer.start()
    try:
        while piece := os.read(ours, 65536):
            found += piece
    except OSError:  # on Linux the end of a terminal is an error
        pass
    os.close(ours)
    code = process.wait()
    timer.cancel()
    text = found.decode().replace("\r\n", "\n")
    assert code == 0, text
    return text


WORDS = [*TINY, "--steps", 60, "--eval-interval", 20, "--save-interval", 25, "--log-interval", 10]


def test_a_run_at_a_terminal(here):
    """The screen holds what log.txt holds, but for the lines of steps; of these only the last."""
    text = in_terminal([*PROGRAM, "train", *WORDS, "--out", "run"], here, columns=60)
    log = (here / "run" / "log.txt").read_text().splitlines()
    steps = [line for line in log if re.match(r"step +\d+/60 \|", line)]
    assert len(steps) == 7
    assert [line for line in screen(text) if line][:200] == [
        line for line in log if line and line not in steps[:-1]
    ]
    shown = re.findall(r"\r\x1b\[K(step \d+/60 \| loss \d\.\d+ \| \S+ tok/s \| eta \d:\d\d)", text)
    assert shown
    assert max(map(len, shown)) < 60


@pytest.mark.slow
def test_plain_lines_at_a_terminal(here):
    text = in_terminal([*PROGRAM, "train", *TINY, "--progress", "plain", "--out", "run"], here)
    assert "\x1b" not in text
    assert screen(text)[:-1] == (here / "run" / "log.txt").read_text().splitlines()


@pytest.mark.slow
def test_a_line_under_mpiexec_where_it_is_asked_for(here):
    """The launcher passes on what rank 0 writes."""
    command = [
        find_launcher(),
        "-n",
        2,
        *PROGRAM,
        "train",
        *WORDS,
        "--progress",
        "line",
        "--out",
        "run",
    ]
    text = in_terminal(command, here)
    log = (here / "run" / "log.txt").read_text().splitlines()
    assert [line for line in screen(text) if line][-5:] == [line for line in log if line][-5:]
    assert "\x1b[K" in text
