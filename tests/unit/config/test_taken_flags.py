"""Flags that users may have in scripts: a change of any command's is a change of the list."""

from pathlib import Path

from mpipar import cli

LIST = Path(__file__).with_name("taken_flags.txt")


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


def test_the_list_has_the_flags_of_all_commands():
    assert listed() == {command: taken(command) for command in cli.COMMANDS}
