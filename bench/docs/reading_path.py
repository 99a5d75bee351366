"""Counts the lines that one default training step runs, by file and by stop of docs/map.md.

    mpiexec -n 4 python -m bench.docs.reading_path [--json bench/results/reading_path.json]

Every rank takes one step of the default layout under a profile hook. The count has the lines of all
functions and methods that ran on any rank. It includes their comments and docstrings, because a
reader reads these too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench import results
from mpipar import ops as ops_module
from mpipar.comm.facts import gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config import flags
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.data.rows import Rows
from mpipar.data.source import load_source
from mpipar.job.session import guard
from mpipar.train.worker import Worker

PACKAGE = results.ROOT / "mpipar"
STOPS = {
    "train/worker": "a worker and its step, in execution order",
    "pipeline/engine": "one method per instruction",
    "pipeline/schedules": "who computes what in which order",
    "models/decoder": "the layers of a stage",
    "layers": "forward, input gradient, weight gradient, and the names of barriers",
    "partition": "one product cut over ranks: where the barriers are",
    "ops": "the arithmetic",
    "comm": "the wire, and the record of each call",
    "train/gradsync": "sums over data-parallel copies and ties, the norm",
    "train/optim": "AdamW over flat buffers",
}
ALIAS = {"models/stage": "models/decoder", "pipeline/instructions": "pipeline/schedules"}
LIMIT = 2000


def stop_of(path: str) -> str | None:
    """The stop that a file belongs to; path: as in the repository."""
    name = path.removeprefix("mpipar/").removesuffix(".py")
    name = ALIAS.get(name, name)
    return next((stop for stop in STOPS if name == stop or name.startswith(f"{stop}/")), None)


def ran_lines(world) -> dict[str, set]:
    """{path in the repository: line numbers} of the functions that this rank runs.

    Comm: everything of a training step.
    """
    lines: dict[str, set] = {}
    seen = set()

    def hook(frame, event, argument):
        code = frame.f_code
        if code in seen or not code.co_filename.startswith(str(PACKAGE)):
            return
        seen.add(code)
        path = str(Path(code.co_filename).relative_to(results.ROOT))
        last = max(line for _, _, line in code.co_lines() if line)
        lines.setdefault(path, set()).update(range(code.co_firstlineno, last + 1))

    config, _ = resolve(Config(), world.size)
    ops = ops_module.make("cpu", "float32")
    tokens = load_source((), config.model.vocab_size).tokens
    sys.setprofile(hook)
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, Recorder(), world)
    worker.initialize()
    rows = Rows(ops, tokens, config, worker.grid)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    sys.setprofile(None)
    return lines


def main(argv, session) -> int:
    """Print the stops; exit 1 if they have grown over the limit."""
    parser = flags.Parser(prog="python -m bench.docs.reading_path", description=__doc__)
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args(argv)
    world = session.start()
    results.check_writable(args.json, session)
    facts = gather_facts(world, {path: sorted(ran) for path, ran in ran_lines(world).items()})
    if facts is None:
        return 0
    files = {path: len(set().union(*(fact.get(path, ()) for fact in facts)))
             for path in sorted(set().union(*facts))}
    rows = [{"stop": f"`mpipar/{stop}`", "what": what,
             "lines": sum(count for path, count in files.items() if stop_of(path) == stop)}
            for stop, what in STOPS.items()]
    total = sum(row["lines"] for row in rows)
    for row in rows:
        print(f"{row['lines']:5d}  {row['stop']}  {row['what']}")
    print(f"{total:5d}  of at most {LIMIT}")
    results.write(args.json, "bench.docs.reading_path", rows, beside={"files": files}, lines=total)
    return int(total > LIMIT or not all(row["lines"] for row in rows))


if __name__ == "__main__":
    guard(main)
