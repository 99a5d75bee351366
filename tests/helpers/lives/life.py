"""The life of a run, by mpipar's own commands.

Train, evaluate, sample and save; resume; verify and export; generate.

The first command runs on the layout of a case, the later ones on that of another case. Their
results are compared with the truth of one rank.

The commands are jobs inside a job: they run on some ranks of one that is already running.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np

from mpipar import cli
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.launcher import Launcher
from mpipar.comm.objects import all_gather_objects
from mpipar.config.run import PROMPT
from mpipar.config.text import printable
from mpipar.errors import UserError
from mpipar.run import generation
from mpipar.run.files.settings import ParsedConfig, over, to_toml, values_of
from mpipar.run.process.session import AgreedError, Session
from mpipar.run.resolve import resolve
from mpipar.run.resume import FIXED, resumed
from mpipar.train.worker import Worker
from tests.helpers.lives.choices import (
    BASE,
    CHOICES,
    LATER,
    STEPS,
    Case,
    ranks_of,
    settings_of,
    words_of,
)
from tests.helpers.lives.truth import (
    NUMBERS,
    Truth,
    data_of,
    start_of,
    truth_of,
    weights_in,
    write_data,
)

# What a resumed run may choose differently.
FREE = [name for name in CHOICES if name not in {*NUMBERS, *FIXED, "init_from", "resume"}]
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Tolerances in units of rounding: of losses as they are, of a tensor's movement since the start.
LOSS_UNITS, MOVE_UNITS = 100, 10_000
HALF_LOSS_UNITS, HALF_MOVE_UNITS = 16, 80  # of 16 bits, whose products round as well
FLOOR = 1e-3


@contextlib.contextmanager
def watched(seen: list):
    """Add the logits (count,) to `seen` whenever a text's next token is chosen, sorted by size."""
    plain = generation.best

    def best(*arguments):
        found = plain(*arguments)
        seen.append(found[0, :, 0])
        return found

    with mock.patch.object(generation, "best", best):
        yield


class Ended(Exception):
    """A command has ended with a code other than 0, and with it the life."""


class Lives:
    """Runs lives in a folder that all ranks see. world: an mpi4py communicator."""

    def __init__(self, world, folder: Path):
        self.world, self.folder = world, folder
        self.comms = {
            size: world.Split(int(world.rank < size), world.rank)
            for size in range(1, world.size + 1)
        }

    def on(self, check, size: int, *words) -> tuple[str, list]:
        """Run a command on the first ranks; return (what rank 0 prints, logits seen).

        Raises Ended on all ranks if the command ends with a code other than 0. Comm: the command; a
        barrier and a broadcast over the world.
        """
        code, text, seen = 0, "", []
        if self.world.rank < size:
            try:
                with watched(seen):
                    code, text = run_inside(self.comms[size], *words)
            except UserError as error:
                code, text = error.exit_code, str(error)
        quiet_barrier(self.world)
        if check and code:
            check.wrong.append(
                f"{' '.join(map(str, words[:2]))} ended with {code}:\n{text[-1500:]}"
            )
        if self.world.bcast(code):
            raise Ended
        return text, next(filter(None, self.world.gather(seen) or ()), [])

    def live(self, case: Case, other: Case, truth: Truth | None) -> Check | None:
        """Return the Check of a case's life, resumed as `other`; None except on rank 0.

        truth: on world rank 0. Comm: that of all commands.
        """
        check = Check(case, truth) if self.world.rank == 0 else None
        with contextlib.suppress(Ended):
            self._live(case, other, check)
        return check

    def _live(self, case, other, check):
        run, later, out = (
            self.folder / f"{name}-{case['number']}" for name in ("run", "later", "out")
        )
        given = settings_of(case) | data_of(self.folder) | {"out": str(run)}
        if case["init_from"]:
            given["init_from"] = str(start_of(self.folder, case))
        output = self.on(check, ranks_of(case), "train", *words_of(given))
        if check:
            check.run(run, 1, STEPS)
            check.texts(run, STEPS, *output)
        place, first = [run, "--out", later], STEPS + 1
        if case["resume"] == "auto":
            place, later, first = ["auto", "--out", run], run, 1
        output = self.on(
            check,
            ranks_of(other),
            "train",
            "--resume",
            *place,
            "--steps",
            LATER,
            *words_of(free_of(other)),
        )
        if check:
            check.resumed(output[0])
            check.run(later, first, LATER)
            check.texts(later, LATER, *output)
        self.on(check, 1, "ckpt", "verify", run)
        self.on(check, 1, "ckpt", "export", later, "--out", out)
        if check:
            check.exported(out, later / "weights")
        self.generate(check, case, other, out)

    def generate(self, check, case, other, weights):
        """Continue the prompt on the layout of the other case."""
        prompts = self.folder / f"prompts-{case['number']}"
        if check:
            prompts.write_text(PROMPT)
        # The run's own texts end with the rows it was trained on, those of rotations need not.
        room = BASE["seq_len"] + 1 - len(PROMPT)
        names = ("seed", "dtype")
        given = {name: case[name] for name in names if case[name] is not None} | {
            "sample_tokens": room if case["sample_tokens"] is None else case["sample_tokens"],
            "dp": other["dp"] * other["cp"],
            "pp": other["pp"],
            "tp": other["tp"],
        }
        quiet_barrier(self.world)
        output = self.on(
            check,
            ranks_of(other),
            "generate",
            weights,
            "--prompts",
            prompts,
            *words_of(given),
        )
        if check:
            check.tokens(json.loads(output[0])["tokens"])
            check.logits("generate", LATER, output[1])


def rms(x) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def free_of(other: Case) -> dict:
    """Return the settings that a resumed run takes from another case."""
    return {name: other[name] for name in FREE if other[name] is not None}


def goes_on_as(case: Case, other: Case) -> bool:
    """Return whether mpipar lets a run of `case` resume with the free choices of `other`."""
    config, _ = resolve(over({}, ParsedConfig(None, given=settings_of(case))), ranks_of(case))
    reading = over({}, ParsedConfig(None, given=free_of(other) | {"steps": LATER}))
    try:
        resolve(resumed(reading, values_of(to_toml(config)), ranks_of(other)), ranks_of(other))
    except UserError:
        return False
    return True


def other_of(case: Case, before: list[Case]) -> Case:
    """Return the newest of some cases as which a case's run may resume, else the case itself."""
    return next(one for one in [*reversed(before), case] if goes_on_as(case, one))


def live_all(world, folder: Path, cases, planted=contextlib.nullcontext) -> list[str]:
    """Run the lives of some cases; return all that is wrong, on every rank.

    cases: on world rank 0, which sends them to the others. planted: a context in which the lives
    run, but not their truths. Comm: that of all commands, and broadcasts.
    """
    lives, before, wrong = Lives(world, folder), [], []
    if world.rank == 0:
        folder.mkdir(exist_ok=True)
        write_data(folder)
        cases = iter(cases)
    while True:
        batch = []
        if world.rank == 0:  # one truth for each rank
            for case in itertools.islice(cases, world.size):
                numbered = {**case, "number": len(before)}
                batch.append((numbered, other_of(numbered, before)))
                before.append(numbered)
        quiet_barrier(world)
        batch = world.bcast(batch)
        if not batch:
            return world.bcast(wrong)
        own = truth_of(batch[world.rank][0], folder) if world.rank < len(batch) else None
        quiet_barrier(world)
        truths = world.gather(own) or [None] * len(batch)
        for (case, other), truth in zip(batch, truths, strict=False):
            with planted():
                check = lives.live(case, other, truth)
            if check and check.wrong:
                words = (" ".join(words_of(of)) for of in (settings_of(case), free_of(other)))
                wrong += [f"case {' and resumes as '.join(words)}:", *check.wrong]


class Check:
    """Compares the results of the commands of one life with the truth."""

    def __init__(self, case: Case, truth: Truth):
        self.case, self.truth, self.wrong = case, truth, []
        self.exact = case["dtype"] == "float64"
        self.unit = UNIT[case["dtype"]]
        self.master = UNIT["float64" if self.exact else "float32"]  # of the weights that are kept
        half = case["dtype"] in ("bfloat16", "float16")
        self.loss_units, self.move_units = (
            (HALF_LOSS_UNITS, HALF_MOVE_UNITS) if half else (LOSS_UNITS, MOVE_UNITS)
        )
        self.floor = 1.0 if half else FLOOR

    def close(self, what: str, found: float, expected: float) -> None:
        """Check that a loss is that of one rank, up to rounding."""
        error = abs(found - expected) / abs(expected) / self.unit
        if not error <= self.loss_units:  # also NaN
            self.wrong.append(f"{what}: {found!r}, of one rank {expected!r}")

    def resumed(self, printed: str) -> None:
        """Check that a resumed run begins after the last step."""
        if f"resumed after step {STEPS}: " not in printed:
            self.wrong.append("train --resume: did not continue after the last step")

    def run(self, folder: Path, first: int, last: int) -> None:
        """Check losses and held-out losses of a run's steps, and its weights after the last."""
        steps = [*range(first, last + 1)]
        evaluated = [
            step for step in steps if step >= STEPS or (self.case["eval_interval"] and step < STEPS)
        ]
        if not (folder / "result.json").exists():
            self.wrong.append(f"{folder.name}: has no result.json")
            return
        for name, key, wanted, expected in (
            ("metrics.jsonl", "loss", steps, self.truth.losses),
            ("evaluations.jsonl", "held_out_loss", evaluated, self.truth.held_out),
        ):
            lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            if [line["step"] for line in lines] != wanted:
                self.wrong.append(
                    f"{folder.name}/{name}: has steps"
                    f" {[line['step'] for line in lines]}, and not {wanted}"
                )
                continue
            for line in lines:
                self.close(
                    f"{folder.name}/{name}: {key} of step {line['step']}",
                    line[key],
                    expected[line["step"] - 1],
                )
        result = json.loads((folder / "result.json").read_text())
        self.close(
            f"{folder.name}/result.json", result["held_out_loss"], self.truth.held_out[last - 1]
        )
        self.moved(folder / "weights", last)

    def texts(self, folder: Path, step: int, printed: str, seen: list) -> None:
        """Check a run's text after a step, and the logits that chose it."""
        wanted = printable(self.truth.shown[step])
        if self.exact and self.case["sample_tokens"] != 0 and wanted not in printed:
            self.wrong.append(
                f"{folder.name}: the text of one rank is {wanted!r}, but it"
                f" printed\n{printed[printed.find('generated from') :][:300]!r}"
            )
        self.logits(folder.name, step, seen)

    def logits(self, what: str, step: int, seen: list) -> None:
        """Check that the logits that chose a text are those of one rank, up to rounding.

        In a narrower type a text may continue differently, so that only its first token counts.
        """
        wanted = self.truth.logits[step]
        if self.exact and len(seen) != len(wanted):
            self.wrong.append(f"{what}: chose {len(seen)} tokens, one rank {len(wanted)}")
        for number, (found, logits) in enumerate(zip(seen, wanted, strict=False)):
            expected = np.sort(logits)[::-1][: len(found)]
            error = float(np.abs(found - expected).max() / np.abs(logits).max()) / self.unit
            if not error <= self.move_units:
                self.wrong.append(
                    f"{what}: the logits of token {number} differ from one rank's by"
                    f" {error * self.unit:.1e} of the largest"
                )
            if not self.exact:
                return

    def moved(self, folder: Path, step: int) -> None:
        """Check that every tensor has moved from its start as it has on one rank."""
        found, start, end = weights_in(folder), self.truth.weights[0], self.truth.weights[step]
        if found.keys() != end.keys():
            self.wrong.append(f"{folder}: tensors {sorted(found.keys() ^ end.keys())}")
            return
        largest = max(rms(end[name] - start[name]) for name in end)
        for name, expected in end.items():
            # Where numbers are rounded, some tokens choose other experts, and the bias takes whole
            # steps by the signs of the counts.
            if name.endswith("router.bias") and self.unit > UNIT["float64"]:
                continue
            rounded = LATER * self.master * rms(expected)  # in each update
            error = (
                max(0.0, rms(found[name] - expected) - rounded)
                / max(rms(expected - start[name]), self.floor * largest)
                / self.unit
            )
            if not error <= self.move_units:  # also NaN
                self.wrong.append(
                    f"{folder.parent.name}: {name} after step {step} is"
                    f" {error * self.unit:.1e} of its movement from one rank's"
                )

    def exported(self, out: Path, weights: Path) -> None:
        """Check that an export holds the weights of the run, bit by bit."""
        pair = weights_in(out), weights_in(weights)
        differ = [
            name
            for name in {**pair[0], **pair[1]}
            if not all(name in one for one in pair)
            or pair[0][name].tobytes() != pair[1][name].tobytes()
        ]
        if differ or not pair[0]:
            self.wrong.append(f"{out.name}: differs from {weights} in {differ}")

    def tokens(self, found: list[int]) -> None:
        """Check that generated tokens are those of one rank, unless they may differ by rounding."""
        logits, text = self.truth.logits[LATER], self.truth.texts[LATER]
        expected = text[len(text) - len(logits) :]
        if self.exact and found != expected:
            self.wrong.append(f"generate: tokens {found}, of one rank {expected}")


class Inside(Session):
    """The Session of a command on a communicator; MPI is already running, and stays when it ends.

    comm: an mpi4py communicator.
    """

    def __init__(self, comm):
        super().__init__(Launcher("a session", comm.rank, comm.size, comm.rank, comm.size))
        self.comm = comm

    def start(self):
        """Return the communicator. Comm: a copy of it, a broadcast, and that of compare()."""
        if self.world is None:
            self.world, self._private = self.comm, self.comm.Dup()
            token = bytearray(os.urandom(8))
            self._private.Bcast(token, root=0)
            self._token = token.hex()
            self.host_ranks, self.host_rank = tuple(range(self.comm.size)), self.comm.rank
            if self.facts:
                self.compare(self.facts)
        return self.world

    def leave_mpi(self, exit_code: int) -> int:
        """Return the highest code; MPI stays running. Comm: one all-gather."""
        if self.world is not None:
            exit_code = max(all_gather_objects(self._private, exit_code))
            self._private.Free()
            self.world = None
        return exit_code


@contextlib.contextmanager
def freed_groups():
    """Free the groups of all workers that are made inside, which otherwise only MPI's end would.

    Comm: as many as workers were made, the same on all ranks.
    """
    made, plain = [], Worker.__init__

    def noted(worker, *arguments):
        plain(worker, *arguments)
        made.append(worker)

    with mock.patch.object(Worker, "__init__", noted):
        yield
    for worker in made:
        if worker.mpi_world is not None:
            worker.close()


def run_inside(comm, *words: object) -> tuple[int, str]:
    """Run a command on all ranks of a communicator; return (exit code, what this rank printed).

    A user's error that one rank has shown ends the command on all ranks, as in a job of its own.
    Any other exception is raised here. Comm: that of the command.
    """
    session, text = Inside(comm), io.StringIO()
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        freed_groups(),
        mock.patch.object(os, "fsync", return_value=None),
    ):  # no power fails in a life
        try:
            code = cli.main([str(word) for word in words], session)
        except AgreedError as agreed:
            [code] = agreed.args
        code = session.finish(code)
    return code, text.getvalue()
