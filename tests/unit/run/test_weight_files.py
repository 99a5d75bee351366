"""Import and export of weights in several files with an index; everything a run may start from."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from in_process import alone, printed
from one_rank import fresh, loaded, split_weights, worker_for
from program import LETTERS
from safetensors.numpy import load_file, save_file

from mpipar.errors import DataError
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.checkpoint.weight_files import DIGESTS, INDEX, WEIGHTS
from mpipar.run.source import find_source

F32 = np.dtype(np.float32)


@pytest.fixture
def sharded(tmp_path):
    """A folder of weights in several files, and what the same weights are in one file."""
    for name in ("one", "many"):
        checkpoint.save(fresh(dtype="float32"), tmp_path / name)
    return split_weights(tmp_path / "many"), load_file(tmp_path / "one" / WEIGHTS)


def index_of(folder):
    return json.loads((folder / INDEX).read_text())


def test_several_files_are_one_model_and_replaced_by_one(sharded):
    folder, _ = sharded
    expected = fresh(dtype="float32")
    np.testing.assert_array_equal(loaded(folder, "float32").flats[0].data, expected.flats[0].data)
    checkpoint.save(fresh(dtype="float32", seed=1), folder)
    assert {WEIGHTS, DIGESTS} < {path.name for path in folder.iterdir()}
    assert not (folder / INDEX).exists()
    expected = fresh(dtype="float32", seed=1)
    np.testing.assert_array_equal(loaded(folder, "float32").flats[0].data, expected.flats[0].data)


# --- hostile and broken sets of files


def refused(folder):
    with pytest.raises(DataError) as caught:
        loaded(folder)
    assert checkpoint.weight_problems(worker_for(folder).config) == caught.value.problems
    return caught.value.problems


@pytest.mark.parametrize(
    "name",
    [
        "../one/model.safetensors",
        "/etc/passwd",
        ".safetensors",
        "model.bin",
        "a\\b.safetensors",
        7,
        ["a"],
        None,
    ],
)
def test_an_index_names_files_of_its_own_folder_only(name, sharded):
    folder, _ = sharded
    index = index_of(folder)
    index["weight_map"]["transformer.wpe.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    (problem,) = refused(folder)
    assert "does not name a file in this folder" in problem


def test_a_tensor_in_two_files_is_refused(sharded):
    folder, _ = sharded
    index = index_of(folder)["weight_map"]
    first, last = min(index.values()), max(index.values())
    twice = next(name for name, file in index.items() if file == first)
    save_file(load_file(folder / last) | {twice: np.zeros(3, F32)}, folder / last)
    (problem,) = refused(folder)
    assert f"tensor '{twice}' is in {first} and in {last}" in problem


def test_a_tensor_that_is_not_where_the_index_says(sharded):
    folder, _ = sharded
    index = index_of(folder)
    name = "transformer.wpe.weight"
    file = index["weight_map"][name]
    index["weight_map"][name] = next(one for one in index["weight_map"].values() if one != file)
    (folder / INDEX).write_text(json.dumps(index))
    assert any(f"says that tensor '{name}' is in" in problem for problem in refused(folder))


def test_weights_in_another_form(sharded):
    folder, _ = sharded
    (folder / INDEX).rename(folder / "pytorch_model.bin")
    (problem,) = refused(folder)
    assert f"there is model-00001-of-00003.safetensors: give it the name {WEIGHTS}, or" in problem
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (problem,) = refused(folder)
    assert "model.safetensors: No such file or directory; only safetensors can be read" in problem


def test_what_the_index_does_not_name_is_named_and_not_read(sharded):
    folder, _ = sharded
    file = min(index_of(folder)["weight_map"].values())
    save_file(load_file(folder / file) | {"other": np.zeros(3, F32)}, folder / file)
    (note,) = checkpoint.unread_notes(loaded(folder).config)
    assert note.endswith("not read: other")


# --- runs, folders and checkpoints to start from


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run that has ended; its checkpoints are of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text(LETTERS)
    alone(
        "train",
        "--data",
        "text.txt",
        *"--layers 2 --d-model 8 --heads 2 --ffn 12 --seq-len 5"
        " --batch-size 4 --num-microbatches 2 --sample-tokens 0 --steps 3 --save-interval 2"
        " --out run".split(),
        cwd=folder,
    ).ended()
    return folder


def flat(source, dtype="float64"):
    return loaded(source, dtype).flats[0].master


def test_a_run_stands_for_its_weights_or_its_newest_checkpoint(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    run, steps = tmp_path / "run", tmp_path / "run" / "checkpoints"
    for path in (run, run / "weights", steps / "step-00000003"):
        np.testing.assert_array_equal(flat(path), flat(run), err_msg=str(path))
    assert find_source(str(run), "it") == str(run / "weights")
    assert np.abs(flat(steps / "step-00000002") - flat(run)).max() > 1e-6
    before = flat(run)
    shutil.rmtree(run / "weights")
    assert find_source(str(run), "it") == str(steps / "step-00000003")
    np.testing.assert_array_equal(flat(run), before)
    shutil.rmtree(steps)
    with pytest.raises(DataError, match="it: no weights here"):
        find_source(str(run), "it")


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_export_rounds(dtype, made, tmp_path):
    words = () if dtype is None else ("--dtype", dtype)
    printed("ckpt", "export", made / "run", "--out", tmp_path / "out", *words)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == (dtype or "float32")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    found = load_file(tmp_path / "out" / WEIGHTS)
    expected = load_file(made / "run" / "weights" / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].tobytes() == x.astype(kind).tobytes(), name


def test_export_beside_tokenizer_files(made, tmp_path):
    """A run that has not ended has its tokenizer in weights/ already, and nothing else."""
    shutil.copytree(made / "run", tmp_path / "run")
    weights = tmp_path / "run" / "weights"
    for path in weights.iterdir():
        path.unlink()
    (weights / "generation_config.json").write_text('{"eos_token_id": [5, 300], "x": 1}')
    (weights / "tokenizer_config.json").write_text("{}")
    ((_, step),) = committed_steps(tmp_path / "run" / "checkpoints")[-1:]
    printed("ckpt", "export", tmp_path / "run")
    found = json.loads((weights / "config.json").read_text())
    assert found["eos_token_id"] is None  # 300 is none of the 256 ids
    printed("ckpt", "export", tmp_path / "run", "--out", tmp_path / "out")
    for name in ("generation_config.json", "tokenizer_config.json", WEIGHTS):
        assert (tmp_path / "out" / name).read_bytes() == (weights / name).read_bytes()
    np.testing.assert_array_equal(flat(step), flat(weights))
