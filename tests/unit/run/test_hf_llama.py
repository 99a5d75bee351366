"""config.json of Llama and its relatives, in both spellings, and what is refused."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from config_helpers import reading_of
from in_process import alone
from one_rank import fresh, loaded
from safetensors.numpy import load_file, save_file

from mpipar.config.model import model_config
from mpipar.config.sections import not_taken
from mpipar.errors import DataError, UsageError
from mpipar.models.on_shapes import all_params
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.families import LLAMA, MIXTRAL
from mpipar.run.checkpoint.formats import (
    FORMS,
    OF_WEIGHTS,
    OWN,
    format_of,
    model_settings,
    start_notes,
)
from mpipar.run.resolve import resolve

# As transformers 4 wrote them.
LLAMA_32 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_01 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_01 = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
GPT_2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0,
    "bos_token_id": 50256, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
    "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
REAL = {
    "gpt2": GPT_2,
    "llama": LLAMA_32,
    "mistral": MISTRAL_01,
    "qwen2": QWEN_25,
    "mixtral": MIXTRAL_01,
}


def written(folder, config, **changes):
    """A folder with this config.json; a value of `...` takes a field away."""
    found = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(found))
    return str(folder)


def spelled_anew(config):
    """The same as transformers 5 writes it."""
    found = {
        key: value
        for key, value in config.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return found | {
        "dtype": config["torch_dtype"],
        "rope_parameters": {"rope_theta": config["rope_theta"]} | scaling,
    }


@pytest.mark.parametrize("name", [*REAL][1:])
def test_both_spellings_say_the_same(name, tmp_path):
    old = model_settings(written(tmp_path, REAL[name]))
    assert model_settings(written(tmp_path, spelled_anew(REAL[name]))) == old
    assert old["arch"] == name
    theta = spelled_anew(REAL[name] | {"rope_theta": 7.0})
    assert model_settings(written(tmp_path, theta))["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"hidden_act": "swish"}),
        ("mistral", {"rope_scaling": {"type": "linear", "factor": 1.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 1}}),
        ("mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama", {"is_causal": True, "attn_logit_softcapping": None, "qk_norm": False}),
        ("mistral", {"layer_types": ["sliding_attention"] * 32}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
    ],
)
def test_the_same_function_under_another_name(family, values, tmp_path):
    found = model_settings(written(tmp_path, REAL[family]))
    assert model_settings(written(tmp_path, REAL[family], **values)) == found
    assert start_notes(str(tmp_path)) == []


def test_what_published_models_are(tmp_path):
    found = model_settings(written(tmp_path, LLAMA_32))
    wanted = {
        "layers": 16,
        "d_model": 2048,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 64,
        "ffn": 8192,
        "vocab_size": 128256,
        "tied": True,
        "norm_eps": 1e-5,
        "bias": "none",
        "rope_theta": 5e5,
        "rope_scaling": (32.0, 1.0, 4.0, 8192.0),
        "seq_len": 131072,
        "max_positions": 131072,
    }
    assert wanted.items() <= found.items()
    found = model_settings(written(tmp_path, QWEN_25))
    wanted = {
        "bias": "qkv",
        "rope_scaling": (),
        "rope_theta": 1e6,
        "kv_heads": 2,
        "head_dim": 64,
        "max_positions": 32768,
        "norm_eps": 1e-6,
        "tied": True,
    }
    assert wanted.items() <= found.items()
    # Further tokens than its window are another model than mpipar's.
    found = model_settings(written(tmp_path, MISTRAL_01))
    assert (found["max_positions"], found["seq_len"], found["tied"]) == (4096, 4096, False)
    # What trains in the preset's shape is this model.
    found = model_settings(written(tmp_path, MIXTRAL_01))
    preset = resolve(reading_of("--preset", "mixtral-8x7b", "--seq-len", "32768"), 1)[0].model
    assert found == {name: getattr(preset, name) for name in found}
    assert (found["experts"], found["router_balance"], found["expert_ffn"]) == (8, "loss", 14336)
    written(tmp_path, MIXTRAL_01, router_aux_loss_coef=0, sliding_window=100)
    found = model_settings(str(tmp_path))
    assert (found["router_balance"], found["max_positions"]) == ("none", 100)
    assert "router_loss_coef" not in found


@pytest.mark.parametrize(
    ("preset", "billions"), [("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.6)]
)
def test_presets_have_as_many_parameters_as_is_published(preset, billions):
    model = resolve(reading_of("--preset", preset), 1)[0].model
    count = sum(math.prod(param.shape) for _, param in all_params(model, (model.layers,)))
    assert round(count / 1e9, 1 if billions > 100 else 2) == billions


def test_rows_may_be_shorter_than_the_positions_reach(tmp_path):
    words = ["--init-from", written(tmp_path, MISTRAL_01), "--batch-size", "4"]
    model = resolve(reading_of(*words, "--seq-len", "8"), 1)[0].model
    assert (model.seq_len, model.max_positions) == (8, 4096)
    assert resolve(reading_of(*words), 1)[0].model.seq_len == 4096
    with pytest.raises(DataError, match="sliding_window is 4096, below the 5,000 tokens of a row"):
        resolve(reading_of(*words, "--seq-len", "5000"), 1)
    written(tmp_path, MISTRAL_01, sliding_window=None)
    assert resolve(reading_of(*words, "--seq-len", "5000"), 1)[0].model.max_positions == 32768
    with pytest.raises(UsageError, match="use at most --seq-len 32768"):
        resolve(reading_of(*words, "--seq-len", "32769"), 1)


def test_routers_may_be_trained_otherwise(tmp_path):
    start = (
        "--init-from",
        written(tmp_path, MIXTRAL_01),
        "--seq-len",
        "8",
        "--batch-size",
        "4",
    )
    for words, balance, coef in (
        ((), "loss", 0.02),
        (("--router-balance", "none"), "none", 0.02),
    ):
        model = resolve(reading_of(*start, *words), 1)[0].model
        assert (model.router_balance, model.router_loss_coef) == (balance, coef)
    words = ["--init-from", written(tmp_path, LLAMA_32), "--router-balance", "none"]
    with pytest.raises(UsageError, match="belongs to --experts, but --experts is not given"):
        resolve(reading_of(*words), 1)


REFUSED = [
    ("gpt2", {"model_type": "bert"}, "model_type is 'bert'; mpipar computes gpt2, llama"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"layer_norm_epsilon": "1e-6"}, "layer_norm_epsilon is '1e-6'"),
    ("gpt2", {"n_head": 0}, "n_head is 0"),
    ("gpt2", {"n_embd": 12.0}, "n_embd is 12.0"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; mpipar computes 'silu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True, mlp_bias is False"),
    ("mistral", {"quantization_config": {"b": 4}}, "quantization_config is {'b': 4}"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    ("mistral", {"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
    (
        "mistral",
        {"rope_scaling": {"rope_type": "default", "factor": 8}},
        "rotations of type 'default' have no 'factor'",
    ),
    (
        "mistral",
        {"original_max_position_embeddings": 16},
        "rotations of type 'default' have no 'original_max_position_embeddings'",
    ),
    (
        "llama",
        {"rope_parameters": {"beta_fast": 32}},
        "rotations of type 'llama3' have no 'beta_fast'",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 7.0}},
        "rope_theta is 500000.0 in config.json, and 7.0 in rope_parameters",
    ),
    (
        "llama",
        {"original_max_position_embeddings": 32},
        "original_max_position_embeddings is 32 in config.json, and 8192 in rope_scaling",
    ),
    (
        "mistral",
        {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_theta": 8.0}},
        "rope_theta is 10000.0 in rope_parameters, and 8.0 in rope_scaling",
    ),
    ("qwen2", {"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ("mistral", {"sliding_window": "all"}, "sliding_window is 'all'"),
    ("llama", {"rope_scaling": {"factor": [1, 2]}}, "rope_scaling is {'factor': [1, 2]}"),
    ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor is None"),
    ("qwen2", {"rope_theta": 0}, "rope-theta 0.0: must be greater than 0"),
    ("llama", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
    ("mistral", {"num_key_value_heads": ...}, "num_key_value_heads is None"),
    ("llama", {"hidden_size": 1 << 40}, "d-model 1099511627776: must be at most"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; mpipar comp"),
    ("mixtral", {"num_local_experts": 1}, "experts 1: must be at least 2"),
    ("mixtral", {"router_aux_loss_coef": -1}, "router-loss-coef -1.0: must be"),
    ("llama", {"is_causal": False}, "is_causal is False; mpipar computes True or"),
]


@pytest.mark.parametrize(("name", "changes", "part"), REFUSED)
def test_another_model_is_refused_by_name(name, changes, part, tmp_path):
    with pytest.raises(DataError, match=re.escape(part)):
        model_settings(written(tmp_path, REAL[name], **changes))


def test_what_does_not_matter_is_named_in_one_line(tmp_path):
    assert start_notes(written(tmp_path, QWEN_25)) == []
    (note,) = start_notes(written(tmp_path, QWEN_25, strange=7, other=None, scaled=False, x=0))
    assert note.endswith("ignored fields: scaled, strange, x")
    (note,) = start_notes(written(tmp_path, GPT_2, attn_pdrop=0.0, embd_pdrop=0.1))
    assert note.endswith("ignored fields: embd_pdrop")
    (note,) = start_notes(written(tmp_path, GPT_2, **{f"x{i:02}": 9 for i in range(20)}))
    assert note.endswith(" and 8 more")


# --- out

SMALL = {
    "layers": 2,
    "d_model": 12,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 20,
    "seq_len": 6,
    "vocab_size": 17,
}


SWIGLU = {
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rope",
    "bias": "none",
    "tied": False,
    "head_dim": 4,
}
IN_WORDS = [  # (arch, its values) that config.json of the same name can say
    ("llama", {"head_dim": 6, "rope_scaling": (4.0, 1.0, 3.0, 12.0), "norm_eps": 1e-5}),
    ("llama", {"bias": "all", "tied": True, "head_dim": 4}),
    ("mistral", {"head_dim": 8}),
    ("qwen2", {"rope_theta": 77.0, "head_dim": 4, "bias": "qkv"}),
    ("mixtral", {"experts": 3, "ffn": 24, "router_loss_coef": 0.25, "head_dim": 6}),
    ("mixtral", {"experts": 5, "experts_per_token": 3, "router_balance": "none", "tied": True}),
]
MIXED = [
    ("llama", {"d_model": 14, "head_dim": 6}),
    ("llama", {"bias": "qkv"}),
    ("mistral", {"norm": "layer", "head_dim": 2}),
    ("llama", {"experts": 3}),
    ("mixtral", {"experts": 3, "shared_expert_ffn": 8}),
    ("mixtral", {"experts": 3, "expert_interval": 2}),
    ("mixtral", {"experts": 3, "router_balance": "bias"}),
]


@pytest.mark.parametrize(("arch", "values"), [*IN_WORDS, *MIXED])
def test_what_is_written_is_read_as_the_same_model(arch, values, tmp_path):
    worker = fresh(**SMALL | SWIGLU | {"arch": arch} | values)
    checkpoint.save(worker, tmp_path)
    again = loaded(tmp_path)
    assert replace(again.config.model, seq_len=6) == worker.config.model
    for one, other in zip(again.flats, worker.flats, strict=True):
        np.testing.assert_array_equal(one.master, other.master)
    form = format_of(worker.config.model)
    if form is OWN:  # what an earlier version could state, and this one does not compute
        written(tmp_path, json.loads((tmp_path / "config.json").read_text()), routing="zipf")
        with pytest.raises(DataError, match=r"routing is 'zipf'; mpipar computes"):
            model_settings(str(tmp_path))
    assert form is OWN if (arch, values) in MIXED else form.kind == arch


def test_every_part_has_its_published_name():
    names = {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkv"} | {
        "attn.proj": "self_attn.o_proj", "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm", "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj", "embedding.tokens": "model.embed_tokens.weight",
        "final_norm.w": "model.norm.weight", "head.table": "lm_head.weight",
    }  # fmt: skip
    assert LLAMA.names == names
    assert MIXTRAL.names == names | {"moe.router": "block_sparse_moe.gate"}
    assert MIXTRAL.experts == {"moe.up.w": ("w1", "w3"), "moe.down.w": ("w2",)}


def others(field, value):
    """Other values of a field of ModelConfig."""
    if field.metadata["choices"]:
        return [one for one in field.metadata["choices"] if one != value]
    if isinstance(value, tuple):
        return [(4.0, 1.0, 3.0, 12.0)]
    return [not value] if isinstance(value, bool) else [2 * (value or 1)]


@pytest.mark.parametrize("arch", REAL)
def test_a_family_reads_again_whatever_it_describes(arch):
    """Of any field: a family does not describe another value of one that it does not know."""
    form, seen = FORMS[arch], set()
    # Rows may be shorter than the table of positions; no block of Mixtral has an FFN of its own.
    unread = {"seq_len", "max_positions", *["ffn"] * bool(form.experts)}
    model = model_config(form.settings(REAL[arch], None)[0]).completed()
    assert form.describes(model)
    for field in OF_WEIGHTS:
        for value in others(field, getattr(model, field.name)):
            other = replace(model, **{field.name: value})
            if form.describes(other) and not_taken(field.name, vars(other)) is None:
                seen.add(field.name)
                again, _ = form.settings(form.to_json(other, "float32"), None)
                assert field.name in unread or again[field.name] == value
    assert seen >= {"layers", "vocab_size", "norm_eps", "tied"}
    assert not seen & {"norm", "activation", "positions", "arch"}


# --- what travels with weights

TOKENIZER = {
    "tokenizer_config.json": '{"model_max_length": 1000000000000000019884624838656}',
    "special_tokens_map.json": "{}",
    "README.md": "not a tokenizer's",
}


def test_tokenizer_and_ids_travel_from_run_to_run(tmp_path):
    """From a folder to a run, from its checkpoint to a branch, and to what is exported of it."""
    start = tmp_path / "start"
    checkpoint.save(fresh(**SMALL, **SWIGLU, arch="llama", dtype="float32"), start)
    for name, text in TOKENIZER.items():
        (start / name).write_text(text)
    (start / "generation_config.json").unlink()
    config = json.loads((start / "config.json").read_text()) | {"eos_token_id": [3, 4]}
    (start / "config.json").write_text(json.dumps(config))
    np.arange(500, dtype=np.uint16).__mod__(17).tofile(tmp_path / "tokens.bin")
    words = [
        "--data",
        "tokens.bin",
        "--batch-size",
        "4",
        "--num-microbatches",
        "2",
        "--seq-len",
        "5",
        "--sample-tokens",
        "0",
        "--steps",
        "1",
    ]
    for more in (
        ["--init-from", "start", "--out", "run"],
        ["--init-from", "run/checkpoints/step-00000001", "--out", "second"],
    ):
        alone("train", *words, *more, cwd=tmp_path).ended()
    alone("train", "--resume", "run", "--steps", "2", "--out", "branch", cwd=tmp_path).ended()
    alone("ckpt", "export", "branch", "--out", "out", cwd=tmp_path).ended()
    for folder in ("run/weights", "second/weights", "branch/weights", "out"):
        here = tmp_path / folder
        assert not (here / "README.md").exists()
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            assert (here / name).read_text() == TOKENIZER[name], folder
        for name in ("config.json", "generation_config.json"):
            assert json.loads((here / name).read_text())["eos_token_id"] == [3, 4], folder
        assert json.loads((here / "config.json").read_text())["max_position_embeddings"] == 6
    assert (
        load_file(tmp_path / "run" / "weights" / "model.safetensors").keys()
        == load_file(tmp_path / "branch" / "weights" / "model.safetensors").keys()
    )


def test_all_that_is_wrong_with_experts_at_once(tmp_path):
    """Those that are missing or of another size, and numbers that are not finite."""
    checkpoint.save(fresh(**SMALL, **SWIGLU, arch="mixtral", experts=3), tmp_path)
    path, block = tmp_path / "model.safetensors", "model.layers.1.block_sparse_moe"
    tensors = load_file(path)
    bad = tensors | {f"{block}.experts.2.w2.weight": np.zeros((12, 19))}
    del bad[f"{block}.experts.0.w3.weight"]
    save_file(bad, path)
    with pytest.raises(DataError) as caught:
        loaded(tmp_path)
    assert [text.split("tensor ")[-1] for text in caught.value.problems] == [
        f"{block}.experts.2.w2.weight is [12, 19] in the file, [12, 20] in the model",
        "layers.1.block_sparse_moe.experts.0.w3.weight is missing",
    ]
    save_file(tensors | {f"{block}.experts.1.w1.weight": np.full((20, 12), np.nan)}, path)
    with pytest.raises(DataError, match=r"not all numbers of block1.moe.up.w are finite"):
        loaded(tmp_path)
