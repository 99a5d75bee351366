"""Weights on disk: Hugging Face's files, one or several, imported, exported, believed or refused.

Several ranks read and write them in tests/equal/run/test_state.py.
"""

import json
import os
import re
import shutil

import gpt2_reference as gpt2
import numpy as np
import pytest
from config_helpers import reading_of
from helpers import assert_close
from in_process import alone, assert_refused, printed, refusal
from one_rank import fresh, loaded, logits, split_weights
from program import LETTERS, flip
from safetensors.numpy import load_file, save_file
from tokenizers_made import save_tokenizer

from mpipar.errors import DataError, UsageError
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.checkpoint.weight_files import DIGESTS, INDEX, WEIGHTS
from mpipar.run.folder import find_source
from mpipar.run.resolve import resolve

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


def test_rows_shorter_than_the_table_of_positions(model, tmp_path):
    """They use its first rows; the others get no gradient, and all are written again."""
    (folder, tensors), tokens = model(), 4
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


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_other_dtypes_are_read(dtype, model):
    folder, tensors = model(dtype=dtype)
    expected = gpt2.logits(tensors, HEADS, np.arange(6))
    assert_close(logits(loaded(folder), list(range(6))), expected, 1e-13, "logits")


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


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
    found = sorted(problem.split("tensor ")[1] for problem in caught.value.problems)
    assert found == [
        "h.0.attn.c_proj.weight is [12, 13] in the file, [12, 12] in the model",
        "h.1.mlp.c_fc.bias is missing",
        "ln_f.bias is I8, not one of F64, F32, F16, BF16",
        "wpe.weight is [5, 12] in the file, [6, 12] in the model",
    ]


# --- out


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
        index["weight_map"][POSITIONS] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def in_two_files(folder):
    twice = min(load_file(folder / FIRST))
    save_file(load_file(folder / LAST) | {twice: np.zeros(3, F32)}, folder / LAST)


BROKEN = [
    *((named(one), "not name files in this folder") for one in ("../one/a.safetensors", "a.bin")),
    (named(7), "weight_map"),
    (in_two_files, "' is in two files"),
    (lambda folder: (folder / LAST).unlink(), f"{LAST}: No such file"),
]


@pytest.mark.parametrize(("change", "part"), BROKEN)
def test_a_broken_set_of_files_is_refused(change, part, sharded):
    folder, _ = sharded
    change(folder)
    with pytest.raises(DataError, match=re.escape(part)):
        loaded(folder)


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


# --- weights of others


LLAMA = {
    "arch": "llama",
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rope",
    "bias": "none",
    "head_dim": 4,
    "dtype": "float32",
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA | {"arch": "mistral"},
    "qwen2": LLAMA | {"arch": "qwen2", "bias": "qkv"},
    "mixtral": LLAMA | {"arch": "mixtral", "experts": 3},
    "gpt2": {"dtype": "float32"},
}


@pytest.fixture
def saved(tmp_path):
    """A function that writes random weights of a family; returns their folder."""

    def save(family="llama", **values):
        checkpoint.save(fresh(**FAMILIES[family] | values), tmp_path / "w")
        return tmp_path / "w"

    return save


def change(folder, change_tensors):
    """Rewrite a folder's file of weights with what a function makes of its tensors."""
    tensors = load_file(folder / WEIGHTS)
    save_file(change_tensors(tensors), folder / WEIGHTS)


def problems(folder):
    with pytest.raises(DataError) as caught:
        loaded(folder)
    return caught.value.problems


# --- every tensor of a file is read or named


@pytest.mark.parametrize(("family", "count"), [("gpt2", 1), ("llama", 3), ("mixtral", 1)])
def test_a_tensor_that_is_not_read_is_named(family, count, saved):
    folder = saved(family, tied=False)
    if count > 1:
        split_weights(folder, count)
    assert checkpoint.unread_notes(loaded(folder).config) == []
    file = max(folder.glob("*.safetensors"))
    prefix = "transformer.h.0.attn" if family == "gpt2" else "model.layers.0.self_attn"
    buffers = {"transformer.h.0.attn.bias", "model.layers.1.self_attn.rotary_emb.inv_freq"}
    strange = {f"{prefix}.strange.bias", "score.weight"}
    save_file(load_file(file) | dict.fromkeys(buffers | strange, np.zeros(4)), file)
    (note,) = checkpoint.unread_notes(loaded(folder).config)
    assert {name.strip() for name in note.split("not read: ")[1].split(",")} == strange


def test_layers_that_the_configuration_does_not_have_are_named(saved):
    folder = saved()
    edit(folder, num_hidden_layers=1)
    (note,) = checkpoint.unread_notes(loaded(folder).config)
    assert "model.layers.1." in note
    assert note in alone("generate", folder, "--prompt", "5", "--sample-tokens", "1").ended().stderr


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_head_of_a_tied_model_is_its_embedding_or_refused(family, saved):
    folder = saved(family, tied=True)
    table = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    change(folder, lambda one: one | {"lm_head.weight": one[table].copy()})
    assert checkpoint.unread_notes(loaded(folder).config) == []
    change(folder, lambda one: one | {"lm_head.weight": one[table][::-1].copy()})
    (problem,) = problems(folder)
    assert f"tensor lm_head.weight is not {table}" in problem
    change(folder, lambda one: one | {"lm_head.weight": np.zeros((3, 5), np.int8)})
    assert "lm_head.weight" in problems(folder)[0]
    change(folder, lambda one: one | {"lm_head.weight": one[table][::-1].copy()})
    edit(folder, tie_word_embeddings=False)  # as the message says
    assert not loaded(folder).config.model.tied


@pytest.mark.parametrize(
    "rename",
    [
        "_orig_mod.{}".format,
        lambda name: re.sub(r"\.(\d)\.", r".\1._orig_mod.", name),
        lambda name: name.replace("weight", "lora_A.weight"),
    ],
)
def test_names_that_another_program_changed_are_one_line(rename, saved):
    folder = saved()
    change(folder, lambda one: {rename(name): x for name, x in one.items()})
    (problem,) = problems(folder)
    assert "names such as" in problem
    assert len(problem) < 400


# --- files are recognized


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid", b""])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", INDEX])
def test_what_is_no_file_of_weights_is_named(name, content, saved):
    folder = saved()
    if name == INDEX:
        (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(content)
    word = "Git LFS" if content else "empty"
    assert_refused(65, [word], "generate", folder, "--prompt", "5")


def test_what_is_there_instead_of_weights_is_named(saved, tmp_path):
    folder = saved()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    assert_refused(65, ["adapter_model", "LoRA adapter"], "generate", folder, "--prompt", "5")
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert_refused(65, ["is a GGUF"], "generate", tmp_path / "m.gguf", "--prompt", "5")


# --- tokenizers


@pytest.mark.text
def test_only_a_text_with_a_token_beyond_the_table_is_refused(saved, tmp_path):
    folder = saved(vocab_size=400)
    made = save_tokenizer(folder)
    made.add_special_tokens(["<pad>"])
    made.save(str(folder / "tokenizer.json"))
    words = ("generate", folder, "--sample-tokens", "1")
    alone(*words, "--prompt", "a").ended()
    assert "vocabulary of 400" in str(refusal(*words, "--prompt", "a<pad>"))
    (tmp_path / "a.txt").write_text("a b c " * 99)
    printed(
        *("data", "prepare", tmp_path / "a.txt", "--tokenizer", folder, "--out", tmp_path / "data")
    )
    alone(
        *("train", "--init-from", folder, "--data", tmp_path / "data", "--batch-size", "4"),
        *("--num-microbatches", "1", "--steps", "1", "--out", tmp_path / "run"),
    ).ended()


# --- final weights have digests


def test_every_byte_of_final_weights_is_compared(made, tmp_path):
    folder = shutil.copytree(made / "run", tmp_path / "run")
    printed("ckpt", "export", folder, "--out", tmp_path / "out")
    printed("ckpt", "verify", folder)
    for weights in (folder / "weights", tmp_path / "out"):
        alone("generate", weights, "--prompt", "a", "--sample-tokens", "1").ended()
        flip(weights / WEIGHTS, 0.97)
        for words in (
            ("generate", weights, "--prompt", "a"),
            ("train", "--init-from", weights, "--data", made / "text.txt", "--out", tmp_path / "o"),
        ):
            assert_refused(65, [WEIGHTS, "digests.json"], *words)
    assert WEIGHTS in printed("ckpt", "verify", folder, code=65)
    (folder / "weights" / DIGESTS).write_text('{"../../a.txt": "00"}')
    printed("ckpt", "verify", folder)
    (folder / "weights" / DIGESTS).write_text('{"model.safetensors": 1}')
    assert_refused(65, [DIGESTS], "generate", folder, "--prompt", "a")
