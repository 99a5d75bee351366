"""A whole small model in this process: from a folder of weights, or with random ones."""

import json
import types

import numpy as np
from config_helpers import changed, reading_of
from safetensors.numpy import load_file, save_file

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve as resolve_alone
from mpipar.config.sections import Config
from mpipar.layers.stash import Batch
from mpipar.ops import make
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.process.mpi import OneRank
from mpipar.run.resolve import resolve
from mpipar.train.worker import Worker

# A session without a launcher, for programs of bench/ that a test calls.
SESSION = types.SimpleNamespace(
    start=lambda: SESSION.world,
    host_rank=0,
    world=OneRank(),
    agree=lambda function: function(),
)


def worker_for(folder, dtype="float64", *flags):
    """One rank with the shape of the weights in a folder; they are not loaded yet."""
    words = [
        "--init-from",
        str(folder),
        "--dtype",
        dtype,
        "--batch-size",
        "4",
        "--num-microbatches",
        "1",
        *flags,
    ]
    config, _ = resolve(reading_of(*words), 1)
    return Worker(config, Grid(0), make("cpu", dtype), Recorder())


def loaded(folder, dtype="float64", *flags):
    worker = worker_for(folder, dtype, *flags)
    checkpoint.load(worker, worker.config.run.init_from)
    return worker


def logits(worker, ids):
    batch = Batch(np.array([ids]), None, np.arange(len(ids)))
    return worker.forward([0], lambda mb: batch)[0]


def fresh(**values):
    """One rank with random weights, no file."""
    shape = {"layers": 2, "d_model": 12, "heads": 3, "ffn": 20, "seq_len": 6, "vocab_size": 17}
    values = shape | {"batch_size": 4, "num_microbatches": 1, "dtype": "float64"} | values
    config, _ = resolve_alone(changed(Config(), **values), 1)
    worker = Worker(config, Grid(0), make("cpu", config.run.dtype), Recorder())
    worker.initialize()
    return worker


def split_weights(folder, count=3):
    """Make several files of a folder's weights, with an index, as transformers writes them."""
    whole = folder / "model.safetensors"
    tensors, index = load_file(whole), {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::count]}
        save_file(part, folder / name)
        index |= dict.fromkeys(part, name)
    whole.unlink()
    (folder / "digests.json").unlink(missing_ok=True)
    (folder / f"{whole.name}.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
