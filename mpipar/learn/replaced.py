"""Puts other functions in the place of a class's or module's, for as long as a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(owner, **functions) -> Iterator[None]:
    """Inside, these attributes of a class or module are others; afterwards they are as before.

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
