"""Rehearsed steps against real ones: both in turns, on the same two ranks.

    mpiexec -n 2 python -m bench.rehearse.against [--steps 20] [--json FILE]
    python -m bench.rehearse.against --cable 100     # between two hosts of 100 Mbit/s; needs root

The real worker trains; the rehearsal makes its calls. Both take turns, so that a slow spell of the
machine hits both. A pass of the rehearsal takes as long as in the real step just before, without
the waits in it. If a record of the rehearsal differs from its real one, this ends with code 1.

Columns: medians of steps of the slower rank. ratio: of the rehearsed step to the real one, the
median over turns, with the quartiles.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from bench.interconnect.launches import over_cable
from bench.program import Outcome, Program
from bench.rehearse.pace import spread
from bench.rehearse.player import Player
from bench.training import Trained, config_of
from mpipar import ops as ops_module
from mpipar.comm.facts import all_gather_facts
from mpipar.comm.record import Record, Recorder
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED, UsageError

LAYOUTS = {
    "dp 2": "dp=2",
    "dp 2, zero 3": "dp=2 --zero 3",
    "pp 2, 1f1b": "pp=2",
    "pp 2, zb-h1": "pp=2 --schedule zb-h1",
    "tp 2": "tp=2",
    "cp 2": "cp=2",
}
SIZES = "--preset tiny --d-model 256 --seq-len 128 --batch-size 8 --num-microbatches 4"
WARM_UP, TOKENS = 2, 1 << 16  # real steps before the first turn; in the text


def comparable(recorder: Recorder) -> list[Record]:
    """Return the records, without times, and without numbers that count from the first step on."""
    return [
        record._replace(posted_ns=0, waited_ns=0, done_ns=0, seq=0) for record in recorder.records
    ]


def pass_seconds(recorder: Recorder) -> dict[tuple[str, int], float]:
    """Return the median computing time of each (kind, stage) of a pass, without its waits."""
    found = defaultdict(list)
    for span in recorder.spans:
        waited = sum(
            record.done_ns - record.waited_ns
            for record in recorder.records
            if span.start_ns <= record.waited_ns < span.end_ns
        )
        found[span.kind, span.stage].append((span.end_ns - span.start_ns - waited) * 1e-9)
    return {key: median(times) for key, times in found.items() if key[0] != "pipeline"}


def one_layout(world, words: str, steps: int) -> tuple[np.ndarray, bool]:
    """Return (seconds of (real, rehearsed) steps, whether all records are equal).

    Comm: the steps, and gathers of facts to all.
    """
    config = config_of([*SIZES.split(), "--layout", *words.split()])
    ops, recorder = ops_module.make_for(config.run), Recorder(None)
    text = np.random.default_rng(0).integers(0, config.model.vocab_size, TOKENS).astype(np.uint16)
    trained, player = Trained(config, world, recorder, text, ops), Player(config, world, ops)

    def timed(step: int, take: Callable[[int], object], one: Recorder) -> float:
        one.clear()
        world.Barrier()
        start = time.perf_counter()
        take(step)
        return time.perf_counter() - start

    times, equal = [], True
    for step in range(1, 1 + WARM_UP + steps):
        taken = timed(step, trained.step, recorder)
        player.seconds = spread(player.script, pass_seconds(recorder))
        times.append((taken, timed(step, player.play, player.recorder)))
        equal = equal and comparable(recorder) == comparable(player.recorder)
    player.close()
    trained.worker.close()
    by_rank = all_gather_facts(world, (times[WARM_UP:], equal))
    return np.max([one for one, _ in by_rank], axis=0), all(same for _, same in by_rank)


def measure(args, session) -> Outcome | int:
    """Measure all layouts, here or over a cable; code 1 if records differ."""
    world, rows, code = session.world, [], 0
    facts = {"steps": args.steps, "model": SIZES}
    if args.cable:
        with session.stop_on_request():
            code, found = over_cable(
                session, args.cable, ["bench.rehearse.against", "--steps", str(args.steps)]
            )
        if found is None:
            print("the ranks on two hosts have ended early", file=sys.stderr)
            return abs(code) or EXIT_CHECK_FAILED
        return Outcome(found["rows"], facts, abs(code))
    if world.size != 2:
        raise UsageError("needs two ranks: mpiexec -n 2 python -m bench.rehearse.against")
    with threadpool_limits(1):
        for name, words in LAYOUTS.items():
            times, equal = one_layout(world, words, args.steps)
            low, ratio, high = np.percentile(times[:, 1] / times[:, 0], (25, 50, 75))
            code = code if equal else EXIT_CHECK_FAILED
            rows.append(
                {
                    "layout": name,
                    "real_ms": 1e3 * float(np.median(times[:, 0])),
                    "rehearsed_ms": 1e3 * float(np.median(times[:, 1])),
                    "low": float(low),
                    "ratio": float(ratio),
                    "high": float(high),
                    "records": "alike" if equal else "differ",
                }
            )
    return Outcome(rows, facts, code) if world.rank == 0 else code


main = Program(
    "rehearse.against",
    __doc__,
    measure,
    together=lambda args: not args.cable,
    add=lambda parser: parser.add_argument(
        "--cable",
        type=flags.count,
        default=0,
        metavar="MBIT",
        help="two hosts, each in a network namespace, joined by a cable of this rate",
    ),
    counts={"--steps": (20, "turns")},
).started(__name__)
