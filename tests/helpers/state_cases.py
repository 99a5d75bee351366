"""State of a run for the checkpoint tests: known numbers in every tensor, on any layout.

All ranks of a layout are in one process, a thread each: real workers that exchange small facts.
"""

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from config_helpers import changed

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.state import Saver, load_state
from mpipar.train.worker import Worker

DECODER = {"layers": 3, "d_model": 12, "heads": 6, "ffn": 21, "seq_len": 8, "vocab_size": 29}
FACTS = {"config": "steps = 3\n", "data": {"tokens": 17, "sha256": "00"}}


# --- all ranks of a layout in one process, a thread each


THREAD_LIMIT = 60.0  # seconds that a thread waits for the others


class World:
    """What `comm.objects` needs of an mpi4py communicator, for one of several threads."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def _everybody(self, x):
        """Every thread's x, in the order of the ranks."""
        slots, barrier = self.shared
        slots[self.rank] = x
        barrier.wait(THREAD_LIMIT)
        found = list(slots)
        barrier.wait(THREAD_LIMIT)
        return found

    def Bcast(self, x, root=0):
        as_bytes(x)[...] = self._everybody(as_bytes(x).copy())[root]

    def Gather(self, x, into, root=0):
        found = self._everybody(as_bytes(x))
        if self.rank == root:
            as_bytes(into)[...] = np.concatenate(found)

    def Gatherv(self, x, into, root=0):
        self.Gather(x, into and into[0], root)


def as_bytes(buffer):
    """The bytes of an array or of any other buffer, not copied."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def workers_of(config, num_ranks):
    """The workers of all ranks of a resolved config. They hold zeros and can't train."""
    shared = [None] * num_ranks, threading.Barrier(num_ranks)
    found = []
    for number in range(num_ranks):
        worker = Worker(
            config,
            Grid.of(config.grid, number),
            ops_module.make(config.run.device, config.run.dtype),
            Recorder(),
        )
        worker.comms.mpi_world = World(number, num_ranks, shared)
        found.append(worker)
    return found


def on_all(function, values):
    """Call function(value) in one thread for each value, all at the same time; the results."""
    with ThreadPoolExecutor(len(values)) as pool:
        futures = [pool.submit(function, value) for value in values]
        return [future.result() for future in futures]


# --- a known state


def config_for(dp=1, pp=1, tp=1, cp=1, **values):
    """A resolved config of a small decoder."""
    values = {
        "batch_size": 4 * dp,
        "num_microbatches": 4,
        "dp": dp,
        "pp": pp,
        "tp": tp,
        "cp": cp,
        **DECODER,
        **values,
    }
    return resolve(changed(Config(), **values), dp * pp * tp * cp)[0]


def state_views(worker):
    """(kind, Param, first, values) of everything that a checkpoint keeps, and of the weights."""
    return [
        (kind, *part)
        for flat in worker.flats
        for kind in flat.state
        for target in (flat.weights if kind == "master" else [kind])
        for part in flat.parts_in(target)
    ]


def full_tensor(name, kind, shape, dtype, seed=0):
    """The known numbers of a full tensor."""
    key = zlib.crc32(f"{name}/{kind}/{seed}".encode())
    return np.random.default_rng(key).standard_normal(shape).astype(dtype)


def known_shard(kind, param, dtype, seed):
    """The known numbers of a rank's shard, flat, with zeros in its padding."""
    full = full_tensor(param.name, kind, param.shape, dtype, seed)
    shard = np.zeros(param.local_shape, dtype)
    shard[tuple(slice(0, stop - start) for start, stop in param.box)] = full[
        tuple(slice(start, stop) for start, stop in param.box)
    ]
    return shard.reshape(-1)


def fill(worker, seed=0):
    """Give a worker a state that differs for each seed and in every number."""
    for kind, param, first, values in state_views(worker):
        shard = known_shard(kind, param, worker.ops.accum_dtype, seed)
        values[...] = shard[first : first + values.size].astype(values.dtype)
    scale = worker.loss_scale
    scale.value, scale.good, scale.skipped = 2.0 ** (3 + seed), 5 + seed, 2 + seed
    for flat in worker.flats:
        flat.copy_master_to_params()


def assert_filled(worker, seed=0):
    """Assert that a worker has exactly the state of `fill`, and zeros in the padding."""
    for kind, param, first, values in state_views(worker):
        shard = known_shard(kind, param, worker.ops.accum_dtype, seed)
        expected = shard[first : first + values.size].astype(values.dtype)
        assert values.tobytes() == expected.tobytes(), f"{kind} of {param.name}"
    for flat in worker.flats:
        if flat.data.size == flat.master.size:
            rounded = flat.master.astype(flat.data.dtype)
            assert flat.data.tobytes() == rounded.tobytes(), "the layers' data"
    assert worker.loss_scale.state() == {
        "value": 2.0 ** (3 + seed),
        "good": 5 + seed,
        "skipped": 2 + seed,
    }


def savers_of(workers, folder, keep=2, background=False):
    """The Savers of all ranks, made together."""
    return on_all(
        lambda worker: Saver(worker, folder, keep=keep, background=background, facts=FACTS), workers
    )


def saved(config, num_ranks, folder, seed=0, step=3):
    """The folder of a checkpoint of the known state, written by all ranks of a layout."""
    workers = workers_of(config, num_ranks)
    for worker in workers:
        fill(worker, seed)
    on_all(lambda saver: saver.save(step), savers_of(workers, folder))
    return committed_steps(folder)[-1][1]


def loaded(config, num_ranks, step_folder):
    """The workers of a layout with the state of a checkpoint."""
    workers, manifest = workers_of(config, num_ranks), read_manifest(step_folder)
    for worker in workers:
        load_state(worker, step_folder, manifest)
    return workers
