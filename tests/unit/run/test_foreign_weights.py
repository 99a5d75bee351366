"""Weights and configurations of others: what is believed, and what is refused or named."""

import json
import re
import shutil

import numpy as np
import pytest
from damage import flip
from in_process import alone, assert_refused, printed, refusal
from one_rank import fresh, loaded, logits, split_weights
from safetensors.numpy import load_file, save_file
from tokenizers_made import save_tokenizer

from mpipar.errors import DataError
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.formats import model_settings, start_notes
from mpipar.run.checkpoint.weight_files import INDEX, WEIGHTS

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


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def problems(folder):
    with pytest.raises(DataError) as caught:
        loaded(folder)
    return caught.value.problems


# --- every tensor of a file is read or named


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_the_configuration_does_not_have_are_named(family, saved):
    folder = saved(family)
    edit(folder, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1})
    (note,) = checkpoint.unread_notes(loaded(folder).config)
    assert "model.layers.1." in note or "transformer.h.1." in note
    shown = alone("generate", folder, "--prompt", "5", "--sample-tokens", "1").ended()
    assert note in shown.stderr


@pytest.mark.parametrize("family", FAMILIES)
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
        "module.{}".format,
        "base_model.model.{}".format,
        lambda name: f"module.{name.removeprefix('model.')}",
        lambda name: re.sub(r"\.(\d)\.", r".\1._orig_mod.", name),
        "strange.{0}.x".format,
        lambda name: name.replace("weight", "lora_A.weight"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_names_that_another_program_changed_are_one_line(family, rename, saved):
    folder = saved(family)
    change(folder, lambda one: {rename(name).replace(" ", ""): x for name, x in one.items()})
    (problem,) = problems(folder)
    assert "names such as" in problem or "LoRA" in problem
    assert len(problem) < 400


# --- files are recognized


OTHERS = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS"),
    (b"GGUF\x03\0\0\0", "GGUF"),
    (b"\x80\x02}q\0.", "pickle"),
    (b"\x1f\x8b\x08\0", "gzip"),
    (b"<!DOCTYPE html><html></html>", "web page"),
    (b"", "empty"),
]


@pytest.mark.parametrize(("content", "word"), OTHERS)
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", INDEX, "pytorch_model.bin"])
def test_what_is_no_file_of_weights_is_named(name, content, word, saved):
    folder = saved()
    if name in (INDEX, "pytorch_model.bin"):
        (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(content)
    error = refusal("generate", folder, "--prompt", "5")
    assert word in str(error)
    assert error.exit_code == 65


@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_is_named(base, saved):
    folder = saved()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not base:
        (folder / "config.json").unlink()
    assert "LoRA adapter" in str(refusal("generate", folder, "--prompt", "5"))


def test_a_file_instead_of_a_folder_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert "is a GGUF" in str(refusal("generate", tmp_path / "m.gguf", "--prompt", "5"))


# --- every field of a configuration is obeyed, refused or named

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"hidden_act": "swish"}),
        ("mixtral", {"hidden_act": "swish"}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 1}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama", {"is_causal": True, "attn_logit_softcapping": None, "qk_norm": False}),
        ("mistral", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
        ("gpt2", {"activation_function": "gelu_fast"}),
        ("gpt2", {"activation_function": "gelu_accurate"}),
        ("gpt2", {"hidden_size": 12, "n_ctx": 6, "num_hidden_layers": 2}),
    ],
)
def test_the_same_function_under_another_name(family, values, saved):
    folder = saved(family)
    before = logits(loaded(folder), [1, 2, 3])
    edit(folder, **values)
    np.testing.assert_array_equal(logits(loaded(folder), [1, 2, 3]), before)
    assert start_notes(str(folder)) == []


def test_scaling_in_either_spelling_or_in_both_is_computed(saved):
    folder, found = saved(), []
    for values in (
        {"rope_scaling": LLAMA3, "rope_parameters": None},
        {"rope_scaling": None, "rope_parameters": LLAMA3},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
    ):
        edit(folder, **values)
        found.append(model_settings(str(folder)))
    assert found[0]["rope_scaling"] == (8.0, 1.0, 4.0, 16.0)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("scaling", [(), (4.0, 1.0, 3.0, 12.0)])
def test_one_spelling_is_written(scaling, saved):
    found = json.loads((saved(rope_scaling=scaling) / "config.json").read_text())
    assert "rope_parameters" not in found
    assert (found["rope_scaling"] is None) == (not scaling)


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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "a.txt").write_text("a text " * 99)
    words = [
        *("train", "--data", folder / "a.txt", "--layers", "1", "--d-model", "8", "--heads", "2"),
        *("--seq-len", "5", "--batch-size", "4", "--num-microbatches", "1", "--steps", "1"),
        *("--sample-tokens", "0", "--out", folder / "r"),
    ]
    alone(*words).ended()
    return folder


def test_every_file_of_final_weights_is_compared(run, tmp_path):
    shutil.copytree(run, tmp_path / "here")
    folder, data = tmp_path / "here" / "r", tmp_path / "here" / "a.txt"
    printed("ckpt", "verify", folder)
    alone("generate", folder, "--prompt", "a", "--sample-tokens", "1").ended()
    file = folder / "weights" / WEIGHTS
    before = file.read_bytes()
    flip(file, 0.97)
    assert file.name in printed("ckpt", "verify", folder, code=65)
    for words in (
        ("generate", folder, "--prompt", "a"),
        ("train", "--init-from", folder, "--data", data, "--out", tmp_path / "other"),
    ):
        assert_refused(65, [file.name, "digests.json"], *words)
    file.write_bytes(before)
    (folder / "weights" / "digests.json").write_text('{"../../a.txt": "00"}')
    printed("ckpt", "verify", folder)
    (folder / "weights" / "digests.json").write_text('{"model.safetensors": 1}')
    assert refusal("generate", folder, "--prompt", "a").exit_code == 65


def test_what_is_exported_has_digests(run, tmp_path):
    printed("ckpt", "export", run / "r", "--out", tmp_path / "out")
    alone("generate", tmp_path / "out", "--prompt", "a", "--sample-tokens", "1").ended()
    flip(tmp_path / "out" / WEIGHTS, 0.97)
    error = refusal("generate", tmp_path / "out", "--prompt", "a")
    assert f"{WEIGHTS}: is damaged, or was changed" in str(error)
