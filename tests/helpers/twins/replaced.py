"""Temporarily replaces functions of a class or module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def replaced(owner, **functions) -> Iterator[None]:
    """Replace these attributes of a class or module inside the block, and restore them afterwards.

    Raises KeyError if the owner has no such attribute of its own.
    """
    former = {name: vars(owner)[name] for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in former.items():
            setattr(owner, name, function)


def in_place_of(owner: type, name: str) -> Callable:
    """Turn function(the original method, self, ...) into a `Twin.plant`: see `replaced`."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def plant():
            plain = vars(owner)[name]
            return replaced(
                owner, **{name: lambda *given, **named: function(plain, *given, **named)}
            )

        return plant

    return decorate
