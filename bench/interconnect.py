"""The name of `mpipar net` in this folder: measures the interconnect."""

import sys

from mpipar import cli
from mpipar.job.session import guard

OLD = {
    "--ways": "--via",
    "--begin": "--begin-bytes",
    "--end": "--end-bytes",
    "--stall-seconds": "--hang-stop",
}
WAYS = {"mpipar.comm": "comm", "C": "c", "all": "comm,mpi4py,c,algorithms"}


def new_words(words: list[str]) -> list[str]:
    """Return the words of a command line with today's names of flags and ways."""
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
    return cli.main(argv, session)


if __name__ == "__main__":
    sys.argv[1:] = ["net", *new_words(sys.argv[1:])]
    guard(main)
