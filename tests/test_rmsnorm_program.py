"""`--norm rms` as a user types it: weights in mpipar's own form, output and refusals."""

import json
import re

import gpt2_reference as gpt2
import numpy as np
import pytest
from config_helpers import reading_of
from one_rank import fresh, loaded
from program import layout_flags, mpipar
from safetensors.numpy import load_file

from mpipar.checkpoint import weights as checkpoint
from mpipar.checkpoint.formats import model_settings
from mpipar.errors import DataError, UsageError
from mpipar.run.resolve import resolve

SMALL = (
    "--layers",
    2,
    "--d-model",
    12,
    "--heads",
    6,
    "--ffn",
    30,
    "--seq-len",
    5,
    "--batch-size",
    8,
    "--num-microbatches",
    2,
    "--norm",
    "rms",
)


@pytest.fixture
def saved(tmp_path):
    """A random model and the folder that it is written to."""
    worker = fresh(norm="rms", tied=False)
    checkpoint.save(worker, tmp_path / "weights")
    return worker, tmp_path / "weights"


def edit(folder, **values):
    """Replace fields of config.json; None takes one out."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_weights_there_and_back(saved):
    worker, folder = saved
    params = {param.name: param for param in worker.stages[0].params}
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == params.keys()
    assert {"block1.norm2.w", "final_norm.w", "head.table"} < params.keys()
    assert not any("norm" in name and name.endswith(".b") for name in params)
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, params[name].data, err_msg=name)
    again = loaded(folder)
    assert again.config.model == worker.config.model
    np.testing.assert_array_equal(again.flats[0].data, worker.flats[0].data)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"model_type": "mpipar-tree"}, "model_type is 'mpipar-tree'; mpipar computes"),
        ({"norm": "none"}, "norm 'none': must be one of"),
        ({"tied": 1}, "tied is 1"),
        ({"heads": 0}, "heads 0: must be at least 1"),
        ({"seq_len": None}, "it lacks 'seq_len'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_configuration_that_describes_no_model_is_refused(saved, values, part):
    edit(saved[1], **values)
    with pytest.raises(DataError, match=re.escape(part)):
        model_settings(str(saved[1]))


def test_the_other_norm_than_that_of_the_weights_is_refused(saved, tmp_path, rng):
    shape = {"layers": 2, "D": 12, "F": 20, "T": 6, "V": 17, "tied": True}
    gpt2.write_model(
        tmp_path / "gpt2", gpt2.random_weights(rng, **shape), gpt2.configuration(heads=3, **shape)
    )
    for folder, typed, true in ((saved[1], "layer", "rms"), (tmp_path / "gpt2", "rms", "layer")):
        with pytest.raises(UsageError) as caught:
            resolve(reading_of("--init-from", str(folder), "--norm", typed), 1)
        (problem,) = caught.value.problems
        assert problem == (
            f"--norm {typed}: contradicts --init-from {folder}, where it is {true};"
            " leave --norm out"
        )


def test_verify_agrees(tmp_path):
    result = mpipar("verify", *SMALL, *layout_flags((1, 1, 2)), ranks=2).ended()
    tensors = 2 * 10 + 3  # of each block, both tables, the final norm
    count = 1 + 2 * tensors
    assert re.search(rf"^{count} of {count} agree to 1e-12", result.stdout, re.MULTILINE)
