"""A checkpoint written by version 0.1.0 can still be read, onto any layout.

It is in `old_checkpoint`, from `mpiexec -n 4 mpipar train --arch llama --heads 2 --kv-heads 1
--d-model 8 --layers 2 --ffn 8 --seq-len 8 --layout tp=2,dp=2 --zero 1 --steps 2`. The run's weights
are beside it: another program's form of the same numbers.
"""

from pathlib import Path

import numpy as np
import pytest
from in_process import printed
from safetensors.numpy import load_file
from state_cases import loaded

from mpipar.config.reading import values_of
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.run.checkpoint.boxes import within
from mpipar.run.checkpoint.load import blocks
from mpipar.run.checkpoint.manifest import read_manifest

OLD = Path(__file__).parent / "old_checkpoint"
STEP = OLD / "checkpoints" / "step-00000002"


def test_it_exports_the_weights_that_its_run_wrote(tmp_path):
    printed("ckpt", "export", OLD, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(OLD / "weights.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    "layout",
    [{"dp": 1}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}, {"dp": 2, "zero": 3}, {"dp": 1, "cp": 2}],
    ids=str,
)
def test_it_loads_onto_any_layout(layout):
    manifest = read_manifest(STEP)
    values = values_of(manifest.config) | {"pp": 1, "cp": 1, "tp": 1, "zero": 0} | layout
    size = values["dp"] * values["pp"] * values["cp"] * values["tp"]
    config, _ = resolve(build(values), size)
    whole = {
        kind: {name: array for name, _, array in blocks(STEP, manifest, manifest.tensors, kind)}
        for kind in manifest.kinds
    }
    seen = set()
    for worker in loaded(config, size, STEP):
        for flat in worker.flats:
            for kind in flat.state:
                for param, first, held in flat.held(kind):
                    shard = np.zeros(param.local_shape, np.float32)
                    box = tuple((0, length) for length in param.shape)
                    inside = tuple(slice(0, stop - start) for start, stop in param.box)
                    shard[inside] = whole[kind][param.name][within(param.box, box)]
                    np.testing.assert_array_equal(
                        held, shard.reshape(-1)[first : first + held.size], err_msg=param.name
                    )
                    seen.add((kind, param.name))
    assert len(seen) == 3 * len(manifest.tensors)
