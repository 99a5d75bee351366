"""The name of `mpipar net` in this folder: measures the interconnect."""

import sys

from mpipar import cli
from mpipar.errors import UsageError
from mpipar.run.process.session import guard

GONE = {
    "--ways": "type --via comm,mpi4py,c",
    "--begin": "type -b",
    "--end": "type -e",
    "--stall-seconds": "type --hang-stop",
    "--seconds": "give -n, the samples of each size",
    "--target": "give -n, the samples of each size",
    "--footprint": "leave it out: buffers rotate through the last-level cache",
    "--sync": "leave it out: a barrier precedes each sample",
    "--bound-GBps": "give --machine SHEET, whose links say what is normal",
    "--no-check": "leave it out: every payload is checked before it is timed",
    "--rounds": "leave it out: vet makes three rounds",
}


def main(argv: list[str], session) -> int:
    """Say the new name, and do what it does. Raises UsageError for GONE flags."""
    if session.launcher.rank == 0:
        print("bench.interconnect is now: mpipar net", file=sys.stderr)
    names = [word.partition("=")[0] for word in argv]
    if gone := [f"{name} is gone; {GONE[name]}" for name in names if name in GONE]:
        raise UsageError(gone)
    sys.argv[1:] = ["net", *(word for word in argv if word != "all")]  # launches start it by this
    return cli.main(sys.argv[1:], session)


if __name__ == "__main__":
    guard(main)
