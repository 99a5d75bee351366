"""A reader's own Python file: it is imported here, and its errors are shown with their line.

The file runs in this process with the rights of whoever started it, as any Python program does. It
runs under the job's guard: whatever it does wrong ends all ranks, and none is left waiting.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

from mpipar.errors import UsageError, UserError
from mpipar.files.bounded import problems_as, read_text


def load(path: Path, names: tuple[str, ...], inside: str | None = None) -> dict[str, object]:
    """The functions of these names in a file; UsageError says what is wrong with it.

    inside: a class of the file that has them as methods.
    """
    with problems_as(UsageError, f"cannot read {path}"):
        text = read_text(path)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    with blamed(path):
        exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 (asked for)
    place, home = vars(module), str(path)
    if inside is not None:
        found = place.get(inside)
        if not isinstance(found, type):
            raise UsageError(f"{path}: defines no class {inside}")
        place, home = vars(found), f"{path}, class {inside}"
    missing = [name for name in names if not isinstance(place.get(name), types.FunctionType)]
    if missing:
        raise UsageError(f"{home}: defines no {' and no '.join(missing)}; functions of these names"
                         f" are needed: {', '.join(names)}")
    return {name: place[name] for name in names}


@contextlib.contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Inside, errors that are no UserError become one that names the reader's file and line.

    Only the reader's code differs from the program that is tested, so the error is the reader's.
    """
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
                         ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(place_of(error, path)) from error


def place_of(error: BaseException, path: Path) -> list[str]:
    """An error in words: the last line of the file that was running, and what happened."""
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    if own:
        return [f"{path}:{own[-1].lineno}: {own[-1].line}: {what}"]
    return [f"with {path} in place, the step fails behind its functions: {what}",
            "one of them gives back something else than the function that it replaces"]
