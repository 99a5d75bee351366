"""Starts the job of `train` and chooses its BLAS kernels, before NumPy is loaded.

All ranks of a job use the same kernels (see `mpipar.job.blas`), because others round in a different
order. The choice is therefore made for the whole job, and saved with the run.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mpipar.comm.facts import all_gather_facts
from mpipar.config.reading import ParsedConfig, over, values_of
from mpipar.config.run import AUTO, NEVER, named_folder
from mpipar.errors import EnvironmentProblem, UserError
from mpipar.files.bounded import read_text
from mpipar.job import blas
from mpipar.job.environment import THREAD_VARIABLES, host_name


def with_kernels(session, parsed: ParsedConfig) -> ParsedConfig:
    """Start the job, and return the configuration with the architecture that it chose.

    The flag takes precedence, then OPENBLAS_CORETYPE, then what the resumed run had; without any of
    them, the vector units that all hosts have in common decide. A flag that a host cannot obey is a
    problem of the configuration; an illegal variable makes every rank raise EnvironmentProblem.
    Comm: that of `Session.start`, and an all-gather of facts over the world.
    """
    run, named = parsed.config.run, os.environ.get(blas.VARIABLE)
    is_refused = parsed.problems or run.blas_arch not in (None, *blas.ARCHITECTURES)
    if run.device != "cpu" or is_refused or "numpy" in sys.modules:
        session.start()
        return parsed
    session.facts[blas.VARIABLE] = str(named)
    name, units = blas.processor()
    fact = {"host": host_name(os.environ), "processor": name, "units": units}
    if session.launcher.rank == 0:  # the others sleep until this rank starts MPI
        fact["saved"] = saved_kernels(run)
    session.start()
    facts = all_gather_facts(session.world, fact)
    if run.blas_arch is not None and (
        problem := unfit(f"--blas-arch {run.blas_arch}", run.blas_arch, facts)
    ):
        return replace(parsed, problems=(problem,), unread=(problem,))
    kernels, words = session.agree(lambda: decide(facts, run.blas_arch, named))
    if kernels is None:
        return parsed
    os.environ[blas.VARIABLE] = kernels
    session.notes.append(f"BLAS: kernels for {kernels}, {words}")
    if kernels not in blas.ARCHITECTURES:  # config.toml holds only what --blas-arch accepts
        return parsed
    return over({}, replace(parsed, given={**parsed.given, "blas_arch": kernels}))


def saved_kernels(run) -> str | None:
    """Return the architecture in the resumed run's config.toml; None if there is none."""
    if run.resume == NEVER:
        return None
    folder = named_folder(run) if run.resume == AUTO else Path(run.resume)
    with suppress(UserError, OSError, ValueError):
        for place in (folder, folder.parent.parent) if folder else ():  # of a run, or of a step
            if (place / "config.toml").is_file():
                found = values_of(read_text("config.toml", root=place)).get("blas_arch")
                return found if isinstance(found, str) else None
    return None


def unfit(given: str, kernels: str, facts: list[dict]) -> str:
    """Return a message about the first host that cannot run these kernels, or nothing."""
    for one in facts:
        if missing := blas.lacking(kernels, one["units"]):
            return (
                f"{given}: the processor of {one['host']} ({one['processor']}) has no"
                f" {', '.join(missing)}; leave it out, and mpipar chooses"
            )
    return ""


def decide(facts: list[dict], asked: str | None, named: str | None) -> tuple[str | None, str]:
    """Return (architecture or None, why). facts: one per rank; world rank 0's has the saved one.

    Raises EnvironmentProblem if a host cannot run the kernels that the variable names.
    """
    saved = facts[0]["saved"]
    common = [unit for unit in facts[0]["units"] if all(unit in one["units"] for one in facts)]
    if asked:
        return asked, "as --blas-arch says"
    if named:
        given, kernels = f"{blas.VARIABLE}={named}", blas.spelled(named)
        if problem := unfit(given, kernels, facts):
            raise EnvironmentProblem(problem)
        before = f"; before: {saved}" if saved and saved != kernels else ""
        return kernels, f"as {given} says{before}"
    if saved and not blas.lacking(saved, common):
        return saved, "as before"
    words = "by the vector units that all hosts have"
    return blas.choice(common), words + (f"; before: {saved}" if saved else "")


def loaded_facts(session, kernels: str | None) -> dict[str, str]:
    """Return what ranks compare about their BLAS once NumPy is loaded; kernels: the job's choice.

    OpenBLAS may have been built without them, or NumPy may use another library; a note says so.
    """
    if kernels is None:
        return {}
    pools = blas.pools()
    # The order in which a process lists its libraries is arbitrary.
    found = ", ".join(sorted(map(blas.shown, pools)))
    if kernels.lower() not in [str(pool.get("architecture")).lower() for pool in pools]:
        session.notes.append(
            f"BLAS: NumPy's library has no kernels for {kernels}: {found or 'none'}"
        )
    return {"BLAS": found}


def settle_threads(session, device: str) -> None:
    """Limit BLAS to one thread per rank where several would wait for each other's cores.

    Threads of one product wait for each other by spinning. Where other programs use the cores, that
    can take many times as long as a single thread. What the user has set stays.
    Comm: an all-gather of a number per rank, if ranks have several threads.
    """
    threads = int(session.presets.get(THREAD_VARIABLES[0], 1))
    if threads == 1 or device != "cpu":
        return
    slower = max(all_gather_facts(session.world, blas.slowdown(threads)))
    if slower < 1:
        session.notes.append(f"BLAS: {threads} threads per rank")
        return
    blas.one_thread()
    session.notes.append(
        f"BLAS: one thread per rank, because the cores are shared: trial products"
        f" took {slower:.1f} times as long with {threads}"
    )
