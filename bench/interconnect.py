"""The name of `mpipar net` in this folder: measures the interconnect."""

import sys

from mpipar import cli
from mpipar.errors import UsageError
from mpipar.run.process.session import guard

OLD = {
    "--ways": "--via",
    "--begin": "--begin-bytes",
    "--end": "--end-bytes",
    "--stall-seconds": "--hang-stop",
}
GONE = {
    "--seconds": "give -n, the samples of each size",
    "--target": "give -n, the samples of each size",
    "--footprint": "leave it out: buffers rotate through the last-level cache",
    "--sync": "leave it out: a barrier precedes each sample",
    "--bound-GBps": "give --machine SHEET, whose links say what is normal",
    "--no-check": "leave it out: every payload is checked before it is timed",
    "--rounds": "leave it out: vet makes three rounds",
}
WAYS = {"mpipar.comm": "comm", "C": "c", "all": "comm,mpi4py,c,algorithms"}


def new_words(words: list[str]) -> list[str]:
    """Return the words of a command line with today's names. Raises UsageError for GONE ones."""
    names = [word.partition("=")[0] for word in words]
    if gone := [f"{name} is gone; {GONE[name]}" for name in names if name in GONE]:
        raise UsageError(gone)
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        ways = ",".join(WAYS.get(way, way) for way in (value if equals else word).split(","))
        if found and found[-1] == "--via":
            found.append(ways)
        elif name in OLD:
            found.append(OLD[name] + equals + (ways if equals and name == "--ways" else value))
        elif word != "all":
            found.append(word)
    return found


def main(argv: list[str], session) -> int:
    """Say the new name, and do what it does."""
    if session.launcher.rank == 0:
        print("bench.interconnect is now: mpipar net", file=sys.stderr)
    sys.argv[1:] = ["net", *new_words(argv)]  # several launches start it again by the new name
    return cli.main(sys.argv[1:], session)


if __name__ == "__main__":
    guard(main)
