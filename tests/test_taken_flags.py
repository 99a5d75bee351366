"""Flags that users may have in scripts: none disappears, and a renamed one says so."""

import pytest
from helpers import REPOSITORY

from mpipar import cli

LIST = REPOSITORY / "tests" / "taken_flags.txt"
RENAMED = {}  # (command, flag of the list) -> what to type today


def taken(command):
    """The arguments of a command as the list writes them: `--flag`, `--flag VALUE` or `NAME`."""
    found = set()
    for action in cli.command_parser(command, every=True)._actions:
        ending = " VALUE" if action.option_strings and action.nargs != 0 else ""
        names = action.option_strings or [action.metavar or action.dest]
        found |= {f"{name}{ending}" for name in names}
    return found


def listed():
    """{command: its lines of the list}."""
    found = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        command, _, argument = line.partition(" ")
        found.setdefault(command, set()).add(argument)
    return found


def test_the_list_has_every_command():
    assert listed().keys() == set(cli.COMMANDS)


@pytest.mark.parametrize("command", listed())
def test_every_flag_of_the_list_is_still_taken(command):
    here = taken(command)
    gone = [
        argument
        for argument in sorted(listed()[command] - here)
        if RENAMED.get((command, argument)) not in here
    ]
    assert not gone, f"mpipar {command} no longer takes {', '.join(gone)}"


@pytest.mark.parametrize("command", listed())
def test_a_new_flag_joins_the_list(command):
    new = taken(command) - listed()[command] - set(RENAMED.values())
    assert not new, f"write them into {LIST.name}: {', '.join(sorted(new))}"


@pytest.mark.parametrize(
    ("argument", "new"), [("--steps VALUE", "--num-steps VALUE"), ("--tied", "--tied VALUE")]
)
def test_a_flag_that_is_gone_is_found(monkeypatch, argument, new):
    names = taken("train") - {argument} | {new}
    monkeypatch.setitem(globals(), "taken", lambda command: names)
    with pytest.raises(AssertionError, match=f"no longer takes {argument}"):
        test_every_flag_of_the_list_is_still_taken("train")
    monkeypatch.setitem(RENAMED, ("train", argument), new)
    test_every_flag_of_the_list_is_still_taken("train")
