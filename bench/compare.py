"""The name of `mpipar net compare` in this folder; exit code 1 only with --check."""

import sys

from mpipar import cli
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.run.process.session import guard


def main(argv: list[str], session) -> int:
    """Say the new name, and do what it does."""
    print("bench.compare is now: mpipar net compare", file=sys.stderr)
    code = cli.main(["net", "compare", *(word for word in argv if word != "--check")], session)
    return EXIT_OK if code == EXIT_CHECK_FAILED and "--check" not in argv else code


if __name__ == "__main__":
    guard(main)
