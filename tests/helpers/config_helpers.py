"""Configurations as a user would type them, for the tests of configuration and command line."""

import dataclasses

import pytest

from mpipar import cli
from mpipar.config.sections import Config
from mpipar.errors import UsageError
from mpipar.run.resolve import resolve


def changed(config=None, **values):
    """A Config with flat values replaced."""
    config = config or Config()
    parts = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        names = {field.name for field in dataclasses.fields(part)}
        parts[section.name] = dataclasses.replace(
            part, **{name: values.pop(name) for name in names & values.keys()}
        )
    assert not values, f"no fields of {config.model}: {values}"
    return Config(**parts)


def reading_of(*argv):
    """The result of reading these words as `mpipar train` does."""
    return cli.context_of(None, "train", list(argv)).parsed


def check_refused(words, messages):
    """Raise AssertionError unless the words are refused with one problem for each message."""
    with pytest.raises(UsageError) as caught:
        resolve(reading_of(*words.split()), 1)
    assert len(caught.value.problems) == len(messages)
    for problem, message in zip(caught.value.problems, messages, strict=True):
        assert message in problem
