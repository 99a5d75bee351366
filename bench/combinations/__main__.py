"""Lives of runs over all combinations of choices, each compared with one plain rank.

    mpiexec -n 4 python -m bench.combinations                                  # all legal pairs
    mpiexec -n 4 python -m bench.combinations --triples --seconds 480 --json FILE

A life is: train 3 steps, evaluate, sample, save, resume on the layout of another case, export,
generate. Its losses, held-out losses, weights and texts must be those of one rank. In the cases
each legal pair of values occurs. With --triples more cases follow until the time is over, each with
many new triples. Exit code 1 says that a life differs.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

from bench import results
from bench.combinations import kept
from bench.combinations.array import Completion, Coverage, triples
from bench.combinations.choices import CHOICES, settings_of, words_of
from bench.combinations.life import live_all
from mpipar.comm.hosts import quiet_barrier
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError
from mpipar.job.session import guard

RANKS = 4


def parse(argv):
    """Read and check the flags. Raises UsageError."""
    parser = flags.Parser(prog="python -m bench.combinations", description=__doc__)
    parser.add_argument("--triples", action="store_true", help="go on behind the pairs")
    parser.add_argument("--seconds", type=float, default=480.0,
                        help="no life begins later than so many seconds after the first (480)")
    parser.add_argument("--json", metavar="FILE", help="write the outcome to this file")
    return parser.parse_args(argv)


def main(argv, session) -> int:
    """Run the lives and print what differs; return 1 if any does."""
    args, world = parse(argv), session.start()
    if world.size != RANKS:
        raise UsageError(f"{world.size} ranks: the cases are for {RANKS}; start them with mpiexec"
                         f" -n {RANKS}")
    results.check_writable(args.json, session)
    tally = Tally(args) if world.rank == 0 else None
    quiet_barrier(world)
    with tempfile.TemporaryDirectory(prefix="mpipar-lives-") as own:
        folder = Path(world.bcast(own))

        def where(text):
            session.where = lambda: text

        for case, check in live_all(world, folder, tally and tally.cases(), where=where):
            if tally:
                tally.add(case, check)
        quiet_barrier(world)
    code = tally.tell() if tally else EXIT_OK
    return world.bcast(code)


class Tally:
    """The cases of one call, how they went, and which pairs and triples occurred. World rank 0."""

    def __init__(self, args):
        self.args = args
        arrays = kept.read()
        self.array, self.illegal = arrays["pairs"], arrays["illegal"]
        self.start = perf_counter()
        self.seen = {2: Coverage(2), **({3: Coverage(3)} if args.triples else {})}
        self.count, self.wrong, self.rows = 0, [], []

    def cases(self):
        """The cases, until the time is over."""
        more = triples(self.seen[3], [part for part, _ in self.illegal], Completion()
                       ) if self.args.triples else ()
        for case in itertools.chain(self.array, more):
            if perf_counter() - self.start > self.args.seconds:
                return
            for seen in self.seen.values():
                seen.add(case)
            yield case

    def add(self, case, check) -> None:
        """Count a life, and print what is wrong with it."""
        self.count += 1
        if check.wrong:
            self.wrong.append(case["number"])
            print(f"case {case['number']} differs: mpipar train"
                  f" {' '.join(words_of(settings_of(case)))}")
            for text in check.wrong:
                print(f"  {text}", flush=True)
        if self.count == len(self.array):
            self.rows.append(self.row("pair", 2))

    def row(self, name: str, strength: int) -> dict:
        """What is told of all cases so far; illegal triples are those that hold an illegal pair."""
        seen = self.seen[strength]
        legal, illegal = seen.different(), seen.holding([part for part, _ in self.illegal])
        legal &= ~illegal
        return {"of_each": name, "cases": self.count, "differ": len(self.wrong),
                "legal": int(legal.sum()), "occurred": int((legal & seen.seen).sum()),
                "illegal": int(illegal.sum()), "seconds": round(perf_counter() - self.start)}

    def tell(self) -> int:
        """Print and write the outcome; return the exit code."""
        if self.args.triples:
            self.rows.append(self.row("triple", 3))
        rows = self.rows or [self.row("pair", 2)]
        print(results.text_table(rows))
        refused = dict(Counter(why for _, why in self.illegal).most_common())
        print("\nillegal pairs by what refuses them:")
        print(results.text_table([{"refusal": why, "pairs": count}
                                  for why, count in refused.items()]))
        results.write(
            self.args.json, "bench.combinations", rows, beside={"refused_pairs": refused},
            ranks=RANKS, choices=len(CHOICES), values=len(self.seen[2].values))
        return EXIT_CHECK_FAILED if self.wrong else EXIT_OK


if __name__ == "__main__":
    guard(main)
