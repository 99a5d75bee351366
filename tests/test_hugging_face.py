"""GPT-2, Llama, Mistral and Qwen2 against transformers: in, computed, trained, and out again."""

import io
import logging
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import assert_all_close, assert_close
from one_rank import loaded, logits

from mpipar.checkpoint import hf_llama
from mpipar.checkpoint import weights as checkpoint
from mpipar.checkpoint.formats import format_of
from mpipar.checkpoint.weight_files import INDEX, WeightFiles
from mpipar.data.rows import Batch
from mpipar.train.optim import learning_rate

torch = pytest.importorskip("torch", reason="peers: PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="peers: transformers is not installed")
pytestmark = pytest.mark.peers

T = 9  # tokens of a row
SIZES = {"vocab_size": 29, "hidden_size": 12, "intermediate_size": 22, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48,
         "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 3.0, "original_max_position_embeddings": 12}
MODELS = {
    "llama": ("Llama", {"head_dim": 6, "rms_norm_eps": 1e-5}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 2,
                          "eos_token_id": [2, 7]}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 4}),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 40,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "mistral, tied": ("Mistral", {"head_dim": 4, "sliding_window": None, "num_key_value_heads": 1,
                                  "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"hidden_size": 16, "num_key_value_heads": 4}),
    "qwen2, tied": ("Qwen2", {"hidden_size": 24, "tie_word_embeddings": True,
                              "num_key_value_heads": 1}),
    "gpt2": ("GPT2", {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": T, "n_inner": 22,
                      "vocab_size": 29, "layer_norm_epsilon": 1e-6}),
}


def theirs(name, dtype=torch.float64):
    """A random model of transformers; no norm's weight is 1 and no bias 0."""
    kind, values = MODELS[name]
    values = {"attn_implementation": "eager"} | (values if kind == "GPT2" else SIZES | values)
    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(3)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).to(dtype).eval()
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.ndim == 1):
            weight.add_(0.3 * torch.randn(weight.shape, dtype=dtype))
    return model


class Float64Torch:
    """The module torch, for transformers: what it rounds to float32 stays in float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def exact(monkeypatch):
    """transformers computes norms, rotations and softmax in float64 too, as mpipar does."""
    for kind in ("llama", "mistral", "qwen2"):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Float64Torch())
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.nn.functional.softmax",
                            lambda x, dim, dtype=None: torch.softmax(x, dim))
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@contextmanager
def no_warning():
    """Fail if transformers warns of anything inside, by either of its ways."""
    text, logger = io.StringIO(), transformers.utils.logging.get_logger("transformers")
    handler = logging.StreamHandler(text)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logger.removeHandler(handler)
    assert text.getvalue() == ""


def read_back(folder, dtype=torch.float64):
    """The model that transformers makes of a folder, without any warning."""
    with no_warning():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager")
    return model.to(dtype).eval()


def rows_of(rng, vocab_size, count=4):
    return rng.integers(0, vocab_size, (count, T + 1))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, rng, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    worker = loaded(tmp_path)
    ids = rows_of(rng, model.config.vocab_size, 1)[0, :T]
    with torch.no_grad():
        expected = model(torch.tensor(ids[None])).logits[0].numpy()
    assert_close(logits(worker, list(ids)), expected, 1e-9, "logits")
    assert np.abs(expected).max() > 0.1


# --- broken twins: the test above must fail


SWAPS = {"k and v": ("attn.k", "attn.v"), "gate and up": ("ffn.gate", "ffn.up"),
         "norms": ("norm1", "norm2")}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("swap", SWAPS)
def test_names_that_are_swapped_would_be_seen(swap, rng, tmp_path, monkeypatch):
    one, other = SWAPS[swap]
    names = {one: hf_llama.LAYER[other], other: hf_llama.LAYER[one]}
    monkeypatch.setattr(hf_llama, "LAYER", hf_llama.LAYER | names)
    with pytest.raises(AssertionError, match="logits: difference"):
        test_logits("llama", rng, tmp_path)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_adamw(name, rng, tmp_path):
    """Loss, norm, every gradient, and every weight after the step, to 1e-9."""
    model = theirs(name)
    model.save_pretrained(tmp_path)
    worker = loaded(tmp_path, "float64", *([] if name == "gpt2" else ["--seq-len", str(T)]))
    rows, train = rows_of(rng, model.config.vocab_size), worker.config.train
    batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), np.arange(T))
    assert train.optimizer == "adamw"
    assert train.weight_decay > 0
    found = theirs_after(model, train, rows)
    loss, norm, _ = worker.gradients(1, lambda mb: batch)
    assert_close(loss, found["loss"], 1e-9, "loss")
    assert_close(norm, found["norm"], 1e-9, "norm")
    assert_all_close(in_files(worker, "grad"), found["gradients"], 1e-9)
    result = worker.train_step(1, lambda mb: batch)
    assert_close(result.grad_norm, found["norm"], 1e-9, "norm of the step")
    assert_all_close(in_files(worker, "master"), found["weights"], 1e-9)


def theirs_after(model, train, rows):
    """Loss, norm, gradients and weights of one step of transformers and PyTorch."""
    ids = torch.tensor(rows)
    weights = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [w for w in weights.values() if w.ndim > 1]},
         {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0}],
        lr=learning_rate(train, 1), betas=(train.beta1, train.beta2), eps=train.eps,
        weight_decay=train.weight_decay)
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: w.grad.numpy().copy() for name, w in weights.items()}
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), train.clip).item()
    optimizer.step()
    return {"loss": loss.item(), "norm": norm, "gradients": gradients,
            "weights": {name: w.detach().numpy() for name, w in weights.items()}}


def in_files(worker, kind):
    """{name in a file: weights or gradients in the file's shape} of one rank."""
    form = format_of(worker.config.model)
    return {form.file_name(param.name): getattr(param, kind).reshape(form.disk_shape(param)).copy()
            for param in worker.stages[0].params}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_files_there_and_back_byte_for_byte(name, dtype, tmp_path):
    kind = getattr(torch, dtype)
    model = theirs(name, kind)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    worker = loaded(tmp_path / "theirs", "float32")
    checkpoint.write(tmp_path / "ours", worker.config, np.dtype(dtype),
                     checkpoint.stream(worker, "master"))
    with WeightFiles(tmp_path / "theirs", "theirs") as files, WeightFiles(
            tmp_path / "ours", "ours") as own:
        assert len(files.files) > len(own.files) == 1
        assert own.tensors.keys() == files.tensors.keys()
        for key, entry in files.tensors.items():
            assert own.tensors[key][:2] == entry[:2], key
            found, expected = (one.rows(key, 0, entry.shape[0]) for one in (own, files))
            assert found.tobytes() == expected.tobytes(), key
    ids = torch.arange(T)[None]
    again = read_back(tmp_path / "ours", kind)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_our_files_load_without_a_warning(name, rng, tmp_path):
    theirs(name).save_pretrained(tmp_path / "theirs")
    worker = loaded(tmp_path / "theirs", "float32")
    worker.initialize(0.2)
    checkpoint.save(worker, tmp_path / "one")
    many = tmp_path / "many"
    checkpoint.write(many, worker.config, np.dtype(np.float32),
                     checkpoint.stream(worker, "master"), 5000)
    assert (many / INDEX).exists()
    ids = rows_of(rng, 29, 1)[0, :T]
    for folder in (tmp_path / "one", many):
        model = read_back(folder)
        with torch.no_grad():
            expected = model(torch.tensor(ids[None])).logits[0].numpy()
        assert_close(logits(worker, list(ids)), expected, 1e-5, "logits")
