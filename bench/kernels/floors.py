"""What each function of a training step has to move and to compute, from shapes alone.

The real worker takes a step on shapes. Each array that a function reads or writes counts once, and
of a table of embeddings as many rows as there are tokens.
"""

from __future__ import annotations

from typing import Any

from bench.training import config_of, take_step
from mpipar import ops as ops_module
from mpipar.comm.record import Recorder
from mpipar.ops.functions import MEMORY, Ops
from mpipar.ops.signature import Function

ONLY_WRITTEN = {("fill", "x"), ("copy", "dst"), ("adamw_runs", "copy")}  # arrays that are not read


class CountedOps(Ops):
    """Behaves like the wrapped ops on shapes; `found` has what calls of each function move and
    compute.

    bytes: of all arrays. largest: of each call's largest array, so that `bytes` are a number of
    passes over it.
    """

    def __init__(self, ops: Any) -> None:
        self._ops, self.found = ops, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = sum(self._ops.flops.values())
        result = getattr(self._ops, function.name)(*arguments, **named)
        if function.name in MEMORY:
            return result
        if sizes := moved_bytes(function, function.bind(arguments, named), result):
            own = self.found.setdefault(
                function.name, dict.fromkeys(("calls", "bytes", "largest", "flops"), 0)
            )
            for name, more in (
                ("calls", 1),
                ("bytes", sum(sizes)),
                ("largest", max(sizes)),
                ("flops", sum(self._ops.flops.values()) - before),
            ):
                own[name] += more
        return result


def moved_bytes(function: Function, given: dict[str, Any], result: Any) -> list[int]:
    """Return the bytes of each array that a call reads or writes; what it changes counts twice."""
    arrays, found = function.arrays(given), []
    tokens = max((x.size for part, x in arrays if part.name in ("ids", "positions")), default=0)
    for part, x in arrays:
        size = x.nbytes if "table" not in part.name else min(len(x), tokens) * x.nbytes // len(x)
        changed = part.written and (function.name, part.name) not in ONLY_WRITTEN
        found += [size] * (2 if changed else 1)
    made = result if isinstance(result, tuple) else (result,)
    return found + [
        x.nbytes
        for part, x in zip(function.gives, made, strict=False)
        if part in function.makes and hasattr(x, "nbytes")
    ]


def counted(words: list[str]) -> tuple[Any, dict[str, dict[str, int]]]:
    """Return the config of flags of `mpipar explain`, and the counts of its first rank's step."""
    config, recorder = config_of(words), Recorder()
    ops = CountedOps(ops_module.shapes_for(config.run, recorder))
    take_step(config, 0, recorder, ops)
    return config, ops.found
