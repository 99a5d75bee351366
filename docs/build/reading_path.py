"""Counts files and lines to open for one default training step, and the lines that it runs.

    mpiexec -n 4 python -m docs.build.reading_path [--json bench/results/reading_path.json]

Every rank takes one step of the default layout under a profile hook. A file is opened if any of its
functions ran on any rank. The lines that run are those of these functions, including their comments
and docstrings, because a reader reads these too.

The step is one call of `Worker.train_step`. docs/one-step.md shows the counts by stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from bench import results
from bench.program import Outcome, Program
from bench.training import Trained
from mpipar.comm.objects import gather_objects
from mpipar.comm.record import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config

PACKAGE = results.ROOT / "mpipar"
STOPS = {
    "train/worker": "the step, in execution order",
    "pipeline/engine": "one method per instruction",
    "pipeline/instructions": "who computes what in which order",
    "models/stage": "the layers of a stage, one after another",
    "layers/parallel": "one product cut over ranks: where the barriers are",
    "layers": "forward, input gradient, weight gradient, and the names of barriers",
    "ops": "the arithmetic",
    "comm": "the wire, and the record of each call",
    "train/gradsync": "sums over data-parallel copies and ties, the norm, the loss scale",
    "train/optim": "AdamW over flat buffers, and the learning rate",
}
LIMIT = 1800  # lines that run in a step
STEP = "one step"  # a row of the result


def stop_of(path: str) -> str | None:
    """Return the stop that a file belongs to; path: as in the repository."""
    name = path.removeprefix("mpipar/").removesuffix(".py")
    return next((stop for stop in STOPS if name == stop or name.startswith(f"{stop}/")), None)


def ran_lines(call: Callable[[], object]) -> dict[str, set[int]]:
    """Return {path in the repository: line numbers} of the functions that a call runs here."""
    lines: dict[str, set[int]] = {}
    seen = set()

    def hook(frame, event, argument):
        code = frame.f_code
        if code in seen or not code.co_filename.startswith(str(PACKAGE)):
            return
        seen.add(code)
        path = str(Path(code.co_filename).relative_to(results.ROOT))
        last = max(line for _, _, line in code.co_lines() if line)
        lines.setdefault(path, set()).update(range(code.co_firstlineno, last + 1))

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return lines


def count(args, session) -> Outcome | int:
    """Count the stops; code 1 if the step runs more lines than the limit."""
    config = resolve(Config(), session.world.size)[0]
    trained = Trained(config, session.world, Recorder())
    ran = {path: sorted(lines) for path, lines in ran_lines(lambda: trained.step(1)).items()}
    facts = gather_objects(session.world, ran)
    if facts is None:
        return 0
    files = {
        path: len(set().union(*(fact.get(path, ()) for fact in facts)))
        for path in sorted(set().union(*facts))
    }
    rows = [
        counts(
            f"`mpipar/{stop}`" if stop else "elsewhere",
            what,
            {path: lines for path, lines in files.items() if stop_of(path) == stop},
        )
        for stop, what in [*STOPS.items(), (None, "rows of data")]
    ]
    rows.append(counts(STEP, "all of this", files))
    wrong = rows[-1]["lines that run"] > LIMIT or not all(row["files"] for row in rows)
    return Outcome(
        rows,
        code=int(wrong),
        beside={"files": files},
        end=f"lines that run in a step: at most {LIMIT}",
    )


def counts(stop: str, what: str, files: dict[str, int]) -> dict:
    """Return the row of a stop. files: {path in the repository: its lines that run}."""
    return {
        "stop": stop,
        "what": what,
        "files": len(files),
        "lines to open": sum(map(lines_of, files)),
        "lines that run": sum(files.values()),
    }


def lines_of(path: str) -> int:
    """Return how many lines a file of the repository has."""
    return len((results.ROOT / path).read_text(encoding="utf-8").splitlines())


main = Program("docs.build.reading_path", __doc__, count, together=True).started(__name__)
