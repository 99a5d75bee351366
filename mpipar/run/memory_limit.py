"""`--memory-limit`: limits the bytes of each rank's arrays, and names the array that did not fit.

On the CPU the kernel enforces it through RLIMIT_DATA, the private memory of the process, and matrix
products use one thread. On a GPU CuPy's pool enforces it. A layer that is too large for one device
thus fails here as it would there.
"""

import re
import resource
import traceback
from contextlib import ExitStack, contextmanager

from threadpoolctl import threadpool_limits

from mpipar.comm.record import source_line
from mpipar.errors import EnvironmentProblem
from mpipar.run.process.environment import give_back_heap, keep_heap

# What a process takes after its start besides the model's arrays: thread stacks, Python objects,
# scratch tiles.
RESERVE_BYTES = 16 << 20
LESS = (
    "more ranks (--tp, --pp), --recompute block or fewer rows (--batch-size) need less, and mpipar"
    " explain shows what each rank of a layout holds"
)


@contextmanager
def memory_limit(config, ops):
    """Limit the arrays inside the block to the config's --memory-limit, if there is one.

    With or without it, a MemoryError becomes EnvironmentProblem, which names the array.
    """
    budget = config.run.memory_limit
    left = "this host has no more" if budget is None else f"less is left of --memory-limit {budget}"
    try:
        with ExitStack() as taken_back:
            if budget is not None and ops.device == "cuda":
                pool = ops.xp.get_default_memory_pool()
                taken_back.callback(pool.set_limit, size=0)  # none
                pool.set_limit(size=budget)
            elif budget is not None:
                _limit_data(ops, budget, taken_back)
            yield
    except MemoryError as error:
        raise EnvironmentProblem(f"out of memory: {wanted(error)}, but {left}; {LESS}") from error


def _limit_data(ops, budget: int, taken_back: ExitStack) -> None:
    # The first product makes BLAS allocate its own buffers. It runs before the limit is set, so
    # that they do not count.
    warm = ops.zeros((512, 512), label="buffers")
    ops.matmul(warm, warm)
    give_back_heap()
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes() + budget + RESERVE_BYTES
    limit = limit if hard < 0 else min(limit, hard)  # -1: no limit
    # With more threads OpenBLAS allocates for each product, and if it cannot, it ends the process
    # without saying why.
    taken_back.enter_context(threadpool_limits(1, "blas"))
    taken_back.callback(keep_heap)
    taken_back.callback(resource.setrlimit, resource.RLIMIT_DATA, (before, hard))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def data_bytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts: its writable private memory."""
    with open("/proc/self/status") as file:
        return int(re.search(r"^VmData:\s+(\d+) kB", file.read(), re.MULTILINE)[1]) * 1024


def wanted(error: MemoryError) -> str:
    """Return what could not be allocated: its label, layer, source line, and the library's words.

    As in `ops/timed_ops.py`, the layer is the `name` of a function, else that of its `self`.
    """
    frames = [
        (source_line(frame.f_code.co_filename, line), frame.f_locals)
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__)))
    ]
    labels = (local.get("label") for where, local in frames if where.startswith("mpipar/"))
    outer = [one for one in frames if re.match("mpipar/(?!ops/)", one[0])]
    names = (one.get("name") or getattr(one.get("self"), "name", "") for _, one in outer)
    of = f" of {layer}" if (layer := next(filter(None, names), "")) else ""
    site = outer[0][0] if outer else ""
    what = f"{next(filter(None, labels), 'a result')}{of} ({site})"
    return f"{what}: {str(error).rstrip('.') or 'an allocation'}"
