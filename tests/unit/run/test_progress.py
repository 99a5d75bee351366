"""The progress line, which rewrites itself: what the screen shows, and that nothing is mangled."""

import io
import re
import threading

import pytest

from mpipar.run.console import progress as progress_module
from mpipar.run.console.output import Log
from mpipar.run.console.progress import progress
from mpipar.run.process.streams import warn


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
    """From its call on, standard output and error are one terminal."""

    def start(made=None):  # not before: pytest sets both streams at the start of a test
        made = made or Terminal()
        monkeypatch.setattr("sys.stdout", made)
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setenv("TERM", "xterm")
        return made

    return start


def shown(terminal):
    return [line.rstrip() for line in screen(terminal.getvalue())]


def at_once(steps=9):
    """A progress line of which no update is left out."""
    return progress("train", steps, "step", mininterval=0, miniters=1)


def test_the_emulator_sees_a_mangled_line(open_terminal):
    """The twin: what does not go through the log follows the line on its row."""
    terminal = open_terminal()
    with at_once() as line:
        line.update()
        print("short")
        assert not shown(terminal)[0].startswith("short")


def test_threads_do_not_mix_their_texts(open_terminal):
    """Steps in one thread, warnings in three others: each line is whole."""
    terminal = open_terminal()
    with at_once(200) as line:

        def warns(name):
            for number in range(50):
                warn(f"{name} {number}")

        threads = [threading.Thread(target=warns, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for _ in range(200):
            line.update()
        for thread in threads:
            thread.join()
    assert sorted(filter(None, shown(terminal))) == sorted(
        f"mpipar: warning: {name} {number}" for name in "abc" for number in range(50)
    )


class Pipe(io.StringIO):
    encoding = "utf-8"


@pytest.mark.parametrize("seconds", [0, 3600])
def test_where_there_is_no_terminal_a_line_comes_only_now_and_then(
    seconds, open_terminal, monkeypatch
):
    pipe = open_terminal(Pipe())
    monkeypatch.setattr(progress_module, "SECONDS", seconds)
    with progress("text", 50, "B") as line:
        for _ in range(50):
            line.update()
    found = pipe.getvalue().splitlines()
    assert "\r" not in pipe.getvalue()
    assert bool(found) == (seconds == 0)
    assert all(one.startswith("text: ") for one in found)


@pytest.mark.parametrize("patience", [-1, 3600])
def test_a_checkpoint_that_takes_long_has_a_line(patience, open_terminal, monkeypatch):
    pipe = open_terminal(Pipe())
    monkeypatch.setattr(progress_module, "SECONDS", 0)
    monkeypatch.setattr(progress_module, "PATIENCE_SECONDS", patience)
    assert b"".join(progress_module.watched("checkpoint", [b"ab", b"cd", b"e"], 5)) == b"abcde"
    found = pipe.getvalue().splitlines()
    assert [one.split()[:2] for one in found[:1]] == [["checkpoint:", "40%|####"]] * (patience < 0)


@pytest.mark.parametrize(
    ("rank", "term", "kind", "taken"),
    [
        (0, "xterm", Terminal, True),
        (0, "dumb", Terminal, False),
        (0, "xterm", Pipe, False),
        (1, "xterm", Terminal, False),
    ],
)
def test_when_steps_have_a_line(rank, term, kind, taken, open_terminal, monkeypatch):
    open_terminal(kind())
    monkeypatch.setenv("TERM", term)
    log = Log(rank)
    with log.steps(0, 9):
        assert (log.line is not None) == taken
    assert log.line is None


def test_the_screen_holds_the_log_but_for_the_lines_of_steps(open_terminal):
    """Of these only the last."""
    terminal, log = open_terminal(), Log(0)
    log("the layout")
    with log.steps(0, 9):
        for step in range(1, 10):
            log.step(f"step {step}/9", last=step == 9)
            log.status("loss 1.0")
            if step == 5:
                log("saved")
                warn("late")
    log("the end")
    assert "\rtrain: " in terminal.getvalue()
    found = [line for line in shown(terminal) if line]
    assert found == ["the layout", "saved", "mpipar: warning: late", "step 9/9", "the end"]
