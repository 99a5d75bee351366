"""Weights on disk: Hugging Face's files, one or several, imported and exported.

Several ranks read and write them in tests/equal/run/test_weights_and_text.py.
"""

import json
import os
import re
import shutil

import gpt2_reference as gpt2
import ml_dtypes
import numpy as np
import pytest
from config_helpers import reading_of
from helpers import assert_close
from in_process import alone, printed, refusal
from one_rank import fresh, loaded, logits, split_weights, worker_for
from program import LETTERS
from safetensors.numpy import load_file, save_file

from mpipar.errors import DataError, UsageError
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.checkpoint.weight_files import DIGESTS, INDEX, WEIGHTS
from mpipar.run.resolve import resolve
from mpipar.run.source import find_source

SHAPE = {"layers": 2, "D": 12, "F": 20, "T": 6, "V": 17}
HEADS = 3


@pytest.fixture
def model(rng, tmp_path):
    """A function that writes a random model in Hugging Face's form; returns (folder, tensors)."""

    def write(tied=True, dtype="F64", prefix="", **shape):
        shape = SHAPE | shape | {"tied": tied}
        tensors = gpt2.random_weights(rng, **shape)
        if dtype != "F64":
            tensors = {name: x.astype(gpt2.DTYPES[dtype]) for name, x in tensors.items()}
        config = gpt2.configuration(heads=HEADS, **shape)
        gpt2.write_model(tmp_path / "model", tensors, config, dtype, prefix)
        return tmp_path / "model", tensors

    return write


# --- in


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("prefix", ["", "transformer."], ids=["bare", "prefixed"])
def test_imported_model_computes_what_gpt2_computes(prefix, tied, model):
    folder, tensors = model(tied, prefix=prefix)
    worker = loaded(folder)
    ids = [3, 16, 0, 7, 7, 1]
    expected = gpt2.logits(tensors, HEADS, np.array(ids))
    assert_close(logits(worker, ids), expected, 1e-13, "logits")
    assert_close(logits(worker, ids[:4]), expected[:4], 1e-13, "logits of fewer tokens")


@pytest.mark.parametrize("tokens", [1, 4])
def test_rows_shorter_than_the_table_of_positions(tokens, model, tmp_path):
    """They use its first rows; the others get no gradient, and all are written again."""
    folder, tensors = model()
    worker = loaded(folder, "float64", "--seq-len", str(tokens), "--optimizer", "sgd")
    ids = np.array([3, 16, 0, 7, 9])[: tokens + 1]
    expected = gpt2.logits(tensors, HEADS, ids[:-1])
    assert_close(logits(worker, list(ids[:-1])), expected, 1e-13, "logits")
    rows = np.tile(ids, (worker.config.train.batch_size, 1))
    batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), np.arange(tokens))
    loss = worker.train_step(1, lambda mb: batch).loss
    chances = np.exp(expected - expected.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    assert_close(loss, -np.log(chances[range(tokens), ids[1:]]).mean(), 1e-13, "loss")
    checkpoint.save(worker, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["transformer.wpe.weight"]
    changed = (found != tensors["wpe.weight"]).any(-1)
    assert changed.tolist() == [True] * tokens + [False] * (6 - tokens)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["n_positions"], written["n_ctx"]) == (6, 6)


def test_each_tensor_counts(model):
    """The comparison above has teeth: a change of any tensor of the file shows in the logits."""
    folder, tensors = model(tied=False)
    ids = np.array([3, 16, 0, 7, 7, 1])
    expected = gpt2.logits(tensors, HEADS, ids)
    for name, x in tensors.items():
        changed_one = tensors | {name: x + 0.01 * np.cos(np.arange(x.size)).reshape(x.shape)}
        gpt2.write_file(folder / "model.safetensors", changed_one)
        assert np.abs(logits(loaded(folder), list(ids)) - expected).max() > 1e-5, name


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_other_dtypes_are_read(dtype, model):
    folder, tensors = model(dtype=dtype)
    expected = gpt2.logits(tensors, HEADS, np.arange(6))
    assert_close(logits(loaded(folder), list(range(6))), expected, 1e-13, "logits")
    single = logits(loaded(folder, "float32"), list(range(6)))
    assert single.dtype == np.float32
    assert_close(single, expected, 1e-5, "logits in float32")


def test_default_ffn_width_and_what_else_is_in_the_file(model):
    """n_inner null stands for 4 D; old files carry masks, which are not weights."""
    folder, tensors = model(F=4 * SHAPE["D"])
    gpt2.write_file(
        folder / "model.safetensors",
        tensors | {"h.0.attn.bias": np.ones((1, 1, 6, 6)), "h.0.attn.masked_bias": np.array(-1e4)},
    )
    assert json.loads((folder / "config.json").read_text())["n_inner"] is None
    worker = loaded(folder)
    assert worker.config.model.ffn == 48
    assert_close(logits(worker, [1, 2]), gpt2.logits(tensors, HEADS, np.array([1, 2])), 1e-13, "y")


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(("values", "part"), [
    ({"model_type": "bert"}, "model_type is 'bert'; mpipar computes gpt2, llama"),
    ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ({"layer_norm_epsilon": "1e-6"}, "layer_norm_epsilon is '1e-6'"),
    ({"layer_norm_epsilon": 2}, "norm-eps 2.0: must be less than 1"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"n_layer": "2"}, "n_layer is '2'"),
    ({"n_head": 0}, "n_head is 0"),
    ({"n_embd": 12.0}, "n_embd is 12.0"),
    ({"vocab_size": None}, "vocab_size is None"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ({"hidden_size": 13}, "hidden_size is 13, but n_embd is 12"),
    ({"n_ctx": 7}, "n_ctx is 7, but n_positions is 6"),
])  # fmt: skip
def test_configuration_of_another_model_is_refused(values, part, model):
    folder, _ = model()
    edit_config(folder, **values)
    with pytest.raises(DataError, match=re.escape(part)):
        model_settings(str(folder))


def test_all_wrong_tensors_at_once(model):
    folder, tensors = model()
    del tensors["h.1.mlp.c_fc.bias"]
    tensors["wpe.weight"] = tensors["wpe.weight"][:-1]
    tensors["h.0.attn.c_proj.weight"] = np.zeros((12, 13))
    save_file(
        {name: x.astype(np.int8) if name == "ln_f.bias" else x for name, x in tensors.items()},
        folder / "model.safetensors",
    )
    with pytest.raises(DataError) as caught:
        loaded(folder)
    assert checkpoint.weight_problems(worker_for(folder).config) == caught.value.problems
    found = sorted(problem.split("tensor ")[1] for problem in caught.value.problems)
    assert found == [
        "h.0.attn.c_proj.weight is [12, 13] in the file, [12, 12] in the model",
        "h.1.mlp.c_fc.bias is missing",
        "ln_f.bias is I8, not one of F64, F32, F16, BF16",
        "wpe.weight is [5, 12] in the file, [6, 12] in the model",
    ]


# --- out


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_written_file_is_what_hugging_face_writes(dtype, tied, tmp_path):
    worker = fresh(tied=tied, dtype=dtype)
    checkpoint.save(worker, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    expected = gpt2.shapes(**SHAPE, tied=tied)
    assert {name.removeprefix("transformer."): x.shape for name, x in found.items()} == expected
    assert all(name.startswith("transformer.") != (name == "lm_head.weight") for name in found)
    assert {x.dtype.name for x in found.values()} == {dtype}
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    wanted = gpt2.configuration(**SHAPE, heads=HEADS, tied=tied)
    ours = {"initializer_range", "bos_token_id", "eos_token_id", "attn_pdrop", "embd_pdrop"}
    ours |= {"resid_pdrop", "tie_word_embeddings"}  # of other programs, or compared below
    assert {key: config[key] for key in wanted.keys() - ours} == {
        key: wanted[key] for key in wanted.keys() - ours
    }
    assert config["tie_word_embeddings"] is tied
    assert config["torch_dtype"] == dtype


def test_a_crash_while_writing_leaves_the_former_file(tmp_path, monkeypatch):
    checkpoint.save(fresh(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    plain = checkpoint.stream

    def stream(worker, kind):
        for number, block in enumerate(plain(worker, kind)):
            if number == 9:
                raise MemoryError("in the middle")
            yield block

    monkeypatch.setattr(checkpoint, "stream", stream)
    with pytest.raises(MemoryError):
        checkpoint.save(fresh(seed=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_kill_before_either_rename_leaves_files_that_load(name, tmp_path, monkeypatch):
    checkpoint.save(fresh(), tmp_path)
    plain = os.replace

    def replace(source, target):
        if target.name == name:
            raise KeyboardInterrupt
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(fresh(seed=1), tmp_path)
    again = loaded(tmp_path)
    np.testing.assert_array_equal(again.flats[0].data, fresh().flats[0].data)


# --- flags and data beside the weights


def test_flags_may_repeat_what_the_weights_say_but_not_contradict(model):
    folder, _ = model()
    same = ["--init-from", str(folder), "--layers", "2", "--heads", "3", "--tied"]
    assert resolve(reading_of(*same), 1)[0].model.d_model == 12
    other = ["--layers", "3", "--vocab-size", "256", "--no-tied", "--seq-len", "8"]
    with pytest.raises(UsageError) as caught:
        resolve(reading_of("--init-from", str(folder), *other), 1)
    assert len(caught.value.problems) == 4
    assert all("contradicts --init-from" in problem for problem in caught.value.problems)


def test_broken_weights_are_told_once_with_everything_else(model, tmp_path):
    folder, tensors = model(V=300)
    del tensors["wpe.weight"], tensors["h.0.ln_1.bias"]
    gpt2.write_file(folder / "model.safetensors", tensors)
    words = ["train", "--init-from", folder, "--out", tmp_path / "run", "--data", "nowhere"]
    found = refusal(*words, ranks=2)
    assert found.exit_code == 65
    for part in ("tensor wpe.weight is missing", "tensor h.0.ln_1.bias is missing", "nowhere"):
        assert str(found).count(part) == 1
    assert not (tmp_path / "run").exists()
    assert str(refusal("generate", folder)).count("is missing") == 2


# --- import and export of weights in several files with an index; everything a run may start from


F32 = np.dtype(np.float32)


@pytest.fixture
def sharded(tmp_path):
    """A folder of weights in several files, and what the same weights are in one file."""
    for name in ("one", "many"):
        checkpoint.save(fresh(dtype="float32"), tmp_path / name)
    return split_weights(tmp_path / "many"), load_file(tmp_path / "one" / WEIGHTS)


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


POSITIONS = "transformer.wpe.weight"
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"


def named(file):
    """A change of the index: the table of positions is in this file."""

    def change(folder):
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"][POSITIONS] != file
        index["weight_map"][POSITIONS] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def in_two_files(folder):
    twice = min(load_file(folder / FIRST))
    save_file(load_file(folder / LAST) | {twice: np.zeros(3, F32)}, folder / LAST)


def without_an_index(folder):
    (folder / INDEX).rename(folder / "pytorch_model.bin")


def without_safetensors(folder):
    without_an_index(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()


FOREIGN = ("../one/a.safetensors", "/etc/passwd", ".safetensors", "model.bin", "a\\b.safetensors")
BROKEN = [
    *((named(one), "not name a file in this folder") for one in (*FOREIGN, 7, ["a"], None)),
    (named(FIRST), f"says that tensor '{POSITIONS}' is in {FIRST}, which lacks it"),
    (in_two_files, f"' is in {FIRST} and in {LAST}"),
    (without_an_index, f"there is {FIRST}: give it the name {WEIGHTS}, or"),
    (without_safetensors, "model.safetensors: No such file or directory; only safetensors can be"),
]


@pytest.mark.parametrize(("change", "part"), BROKEN)
def test_a_broken_set_of_files_is_refused(change, part, sharded):
    folder, _ = sharded
    change(folder)
    with pytest.raises(DataError) as caught:
        loaded(folder)
    assert checkpoint.weight_problems(worker_for(folder).config) == caught.value.problems
    assert any(part in problem for problem in caught.value.problems)


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
