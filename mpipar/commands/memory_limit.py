"""`--memory-limit`: limits the bytes of each rank's arrays, and names the array that did not fit.

On the CPU the kernel enforces it through RLIMIT_DATA, the private memory of the process, and matrix
products use one thread. On a GPU CuPy's pool enforces it. A layer that is too large for one device
thus fails here as it would there, and the error says over how many ranks it fits.
"""

from __future__ import annotations

import re
import resource
import traceback
from dataclasses import replace
from math import prod

from threadpoolctl import threadpool_limits

from mpipar.comm.record import place
from mpipar.commands.resolve import schedule_of_file
from mpipar.config.layout import typed
from mpipar.config.resolve import resolve
from mpipar.config.setting import flag
from mpipar.console.tables import nbytes
from mpipar.errors import OutOfMemory, UserError
from mpipar.job.malloc import give_back_heap, keep_heap
from mpipar.pipeline.combinations import RULES
from mpipar.plan.predict import fullest

# What a process takes after its start besides the model's arrays: thread stacks, Python objects,
# scratch tiles.
RESERVE_BYTES = 16 << 20
# Freed arrays leave holes, and BLAS and NumPy use temporaries that shapes do not show.
HEADROOM = 1.05
MOST_RANKS = 64  # of the layouts that are tried
PASSES = {
    "F": "forward pass",
    "I": "input gradient",
    "recompute": "recomputation",
    "W": "weight gradient",
    "opt": "update",
}


class MemoryLimit:
    """Context manager: inside, arrays are limited to the config's --memory-limit; None: no limit.

    A MemoryError becomes OutOfMemory, with the array, the bytes wanted and left, and layouts that
    fit.
    """

    def __init__(self, config, ops, recorder):
        self.config, self.ops, self.recorder = config, ops, recorder
        self.budget = config.run.memory_limit

    def __enter__(self):
        if self.budget is not None and self.ops.device == "cuda":
            self._pool().set_limit(size=self.budget)
        elif self.budget is not None:
            # The first product makes BLAS allocate its own buffers. It runs before the limit is
            # set, so that they do not count.
            warm = self.ops.zeros((512, 512), label="buffers")
            self.ops.matmul(warm, warm)
            # With more threads OpenBLAS allocates for each product, and if it cannot, it ends the
            # process without saying why.
            self.blas = threadpool_limits(1, "blas")
            give_back_heap()
            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            self.limit = data_bytes() + self.budget + RESERVE_BYTES
            if self.before[1] != resource.RLIM_INFINITY:
                self.limit = min(self.limit, self.before[1])
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.before[1]))
        return self

    def __exit__(self, kind, error, trace):
        out_of_memory = isinstance(error, MemoryError) or str(error) == "can't start new thread"
        left = self._bytes_left() if out_of_memory else None
        if self.budget is not None and self.ops.device == "cuda":
            self._pool().set_limit(size=0)  # none
        elif self.budget is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self.before)
            keep_heap()
            self.blas.restore_original_limits()
        if out_of_memory:
            raise OutOfMemory(self._problems(error, left)) from error

    def _pool(self):
        return self.ops.xp.get_default_memory_pool()

    def _bytes_left(self) -> int | None:
        if self.budget is None:
            return None
        if self.ops.device == "cuda":
            return max(0, self.budget - self._pool().used_bytes())
        return max(0, self.limit - data_bytes())

    def _problems(self, error, left) -> list[str]:
        wanted = bytes_wanted(error)
        text = (
            f"out of memory: {tensor(error)}{self._when()} wants"
            f" {'some bytes' if wanted is None else nbytes(wanted)}"
        )
        if self.budget is None:
            return [
                (
                    f"{text}, and this host has no more; --memory prints the predicted bytes of"
                    " each rank; more ranks (--tp, --pp) or fewer rows (--batch-size) need less"
                )
            ]
        predicted = fullest(self.config)
        parts = ", ".join(f"{label} {nbytes(size)}" for label, size in predicted.peak_bytes.items())
        # Memory that was freed while the error propagated counts as left, such as a finished stage.
        freed = wanted is not None and left >= wanted
        when = " (by now; less when it was requested)" if freed else ""
        found = [
            (
                f"{text}, but {nbytes(left)} are left{when} of --memory-limit {self.budget}"
                f" ({nbytes(self.budget)}{self._beside()})"
            ),
            (
                f"the fullest rank of this layout is predicted to need"
                f" {nbytes(predicted.peak_total)}:"
                f" {parts}"
            ),
        ]
        here = [
            f"{words} ({nbytes(peak)})" for words, peak in cheaper_ways(self.config, self.budget)
        ]
        if here:
            found.append(f"on the same number of ranks it fits with {', or with '.join(here)}")
        layouts = smallest_layouts(self.config, self.budget)
        if not layouts and here:
            return found
        if not layouts:
            return [
                *found,
                (
                    f"no layout of up to {MOST_RANKS} ranks fits: set a higher limit, or"
                    f" a smaller --batch-size, --seq-len or --d-model"
                ),
            ]
        return [
            *found,
            "it fits with "
            + ", or with ".join(
                f"{typed(vars(grid))} (mpiexec -n {grid.num_ranks}; {nbytes(peak)})"
                for grid, peak in layouts
            ),
        ]

    def _beside(self) -> str:
        return (
            ""
            if self.ops.device == "cuda"
            else (f", and {nbytes(RESERVE_BYTES)} more for everything but the model's arrays")
        )

    def _when(self) -> str:
        recorder = self.recorder
        if recorder.phase not in PASSES:
            return ""
        if recorder.stage < 0:
            return f", {PASSES[recorder.phase]},"
        return f", {PASSES[recorder.phase]} of stage {recorder.stage}, microbatch {recorder.mb},"


def tight(budget: int | None, peaks: list[int]) -> str:
    """Return a warning if the limit is below the predicted peak bytes of some rank, else "".

    Such a run may still succeed, since a small model may fit into the reserve of the process.
    """
    if budget is None or max(peaks) <= budget:
        return ""
    return (
        f"--memory-limit {budget} ({nbytes(budget)}) is below the {nbytes(max(peaks))} that the"
        f" fullest rank is predicted to need; it only fits if there is room in the"
        f" {nbytes(RESERVE_BYTES)} that a process has for other things"
    )


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts: its writable private memory."""
    with open("/proc/self/status") as file:
        found = re.search(r"^VmData:\s+(\d+) kB", file.read(), re.MULTILINE)
    return int(found[1]) * 1024


def bytes_wanted(error: Exception) -> int | None:
    """Return the size of the failed allocation from NumPy's or CuPy's error; None if unknown."""
    if hasattr(error, "shape"):
        return prod(error.shape) * error.dtype.itemsize
    found = re.search(r"allocating ([\d,]+) bytes", str(error))
    return int(found[1].replace(",", "")) if found else None


def tensor(error: Exception) -> str:
    """Return what could not be allocated: its label, shape, layer, and source line.

    As in `ops/timed_ops.py`, the layer is the `name` of a function, else that of its `self`.
    """
    label = layer = site = ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        where = place(frame.f_code.co_filename, line)
        if not where.startswith("mpipar/"):
            continue
        local = frame.f_locals
        label = label or local.get("label", "")
        in_ops = where.startswith("mpipar/ops/")
        site = site or ("" if in_ops else where)
        layer = local.get("name") or getattr(local.get("self"), "name", "")
        if layer and not in_ops:
            break
    shape = f" {tuple(error.shape)} {error.dtype}" if hasattr(error, "shape") else ""
    return f"{label or 'a result'}{shape}{f' of {layer}' if layer else ''} ({site})"


# What makes a run smaller on the same ranks, from the cheapest to the most expensive.
CHEAPER = (
    {"recompute": "attention"},
    {"recompute": "block"},
    {"zero": 1},
    {"zero": 3},
    {"zero": 3, "zero_grads": "sharded"},
    {"zero": 3, "zero_grads": "sharded", "recompute": "block"},
)


def cheaper_ways(config, budget: int) -> list[tuple]:
    """Return (flags to add, predicted peak bytes) that make a run fit on its own ranks.

    These are the first settings that fit, and the first ones with the ranks of dp moved to cp.
    """
    given, found = config.grid, []
    grids = [{}, {"dp": 1, "cp": given.dp * given.cp}] if given.dp > 1 else [{}]
    for axes in grids:
        for changes in CHEAPER + ({},) * bool(axes):
            memory = replace(config.memory, **changes)
            fits = _first_fit(replace(config, memory=memory), [axes], budget)
            if fits:
                words = [typed(vars(fits[0]))] if axes else []
                words += [f"{flag(name)} {value}" for name, value in changes.items()]
                found.append((" ".join(words), fits[1]))
                break
    return found


def smallest_layouts(config, budget: int) -> list[tuple]:
    """Return (grid, predicted peak bytes) of the smallest tp, pp, dp and cp that fit by themselves.

    If none does, return the smallest pp x tp that fits, if any.
    """
    given = config.grid
    room = MOST_RANKS // given.num_ranks
    alone = [
        [{axis: getattr(given, axis) * times} for times in range(2, room + 1)]
        for axis in ("tp", "pp", "dp", "cp")
    ]
    both = [
        {"pp": given.pp * a, "tp": given.tp * b}
        for a in range(2, room + 1)
        for b in range(2, room // a + 1)
    ]
    found = [one for axis in alone if (one := _first_fit(config, axis, budget))]
    if found:
        return found
    one = _first_fit(config, sorted(both, key=lambda axes: axes["pp"] * axes["tp"]), budget)
    return [one] if one else []


def _first_fit(config, candidates: list[dict], budget: int):
    """Return (grid, peak bytes) of the first candidate that is legal and fits, or None."""
    csv = schedule_of_file(config)
    for axes in candidates:
        grid = replace(config.grid, **axes, stage_layers=None)
        try:
            larger, _ = resolve(replace(config, grid=grid), grid.num_ranks, rules=RULES, csv=csv)
        except UserError:
            continue
        peak = fullest(larger).peak_total
        if peak * HEADROOM <= budget:
            return larger.grid, peak
    return None
