"""The mark of tests of the faults that docs/failures.md lists."""

import pytest


def fault(number: int, what: str, code):
    """The mark of a test of one of the faults; code: the exit code, None for the launcher's own."""
    return pytest.mark.fault(number, what, code)
