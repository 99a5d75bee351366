"""One rank against transformers' own Llama, Mistral and Qwen2, eager, in float64, to 1e-9.

Loss and every gradient are compared. The weights go from one side to the other in memory.
"""

import contextlib
import functools

import numpy as np
import pytest
from helpers import assert_all_close, assert_close

from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.data.rows import Batch
from mpipar.layers.attention import Attention, Rotation
from mpipar.layers.ffn import GatedFeedForward
from mpipar.ops import make
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.train.worker import Worker

torch = pytest.importorskip("torch", reason="peers: PyTorch is not installed")
pytest.importorskip("safetensors.torch")  # its table of types is made while they have their names
transformers = pytest.importorskip("transformers", reason="peers: transformers is not installed")
pytestmark = pytest.mark.peers
TOL = 1e-9
SHAPE = {"layers": 2, "d_model": 24, "heads": 6, "kv_heads": 2, "head_dim": 8, "ffn": 31,
         "seq_len": 13, "vocab_size": 29, "batch_size": 6, "num_microbatches": 2,
         "dtype": "float64", "norm_eps": 3e-3}
CASES = {
    "llama": {"rope_theta": 30.0, "rope_scaling": (4.0, 1.0, 3.0, 12.0)},
    "mistral": {"rope_theta": 100.0, "heads": 4, "kv_heads": 4},
    "qwen2": {"rope_theta": 50.0, "tied": True, "kv_heads": 1, "head_dim": None, "heads": 5,
              "d_model": 30},
}
NAMES = {"embedding.tokens": "model.embed_tokens.weight", "head.table": "lm_head.weight",
         "final_norm.w": "model.norm.weight"}
OF_A_BLOCK = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
              "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
              "attn.v": "self_attn.v_proj", "attn.proj": "self_attn.o_proj",
              "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"}


def their_name(name):
    """Hugging Face's name of a parameter."""
    if name in NAMES:
        return NAMES[name]
    block, layer = name.split(".", 1)
    layer, kind = layer.rsplit(".", 1)
    suffix = {"w": "weight", "b": "bias"}[kind]
    return f"model.layers.{block.removeprefix('block')}.{OF_A_BLOCK[layer]}.{suffix}"


def their_model(model, name):
    """transformers' model of a completed DecoderConfig."""
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        factor, low, high, length = model.rope_scaling
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                 "high_freq_factor": high, "original_max_position_embeddings": int(length)}
    make_config, make_model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}[name]
    config = make_config(
        vocab_size=model.vocab_size, hidden_size=model.d_model, intermediate_size=model.ffn,
        num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, hidden_act="silu",
        max_position_embeddings=model.seq_len, rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tied, rope_parameters=rope, attn_implementation="eager",
        **({} if name == "qwen2" else {"attention_bias": False}))
    return make_model(config).double().train()


@contextlib.contextmanager
def all_in_float64():
    """transformers computes norms, softmax and angles in float32, whatever the weights are."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


@functools.cache
def theirs(name):
    """(weights, rows, loss, gradients) of transformers' model with random weights."""
    with all_in_float64():
        return _theirs(name)


def _theirs(name):
    rng, model = np.random.default_rng(11), config_of(name).model
    module = their_model(model, name)
    weights = {key: rng.normal(1.0 if "norm" in key else 0.0, 0.3, tuple(one.shape))
               for key, one in module.named_parameters()}
    with torch.no_grad():
        for key, one in module.named_parameters():
            one.copy_(torch.tensor(weights[key]))
    rows = rng.integers(0, model.vocab_size, (6, model.seq_len + 1))
    logits = module(input_ids=torch.tensor(rows[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, model.vocab_size), torch.tensor(rows[:, 1:].reshape(-1)))
    loss.backward()
    gradients = {key: one.grad.numpy() for key, one in module.named_parameters()}
    return weights, rows, float(loss.detach()), gradients


def config_of(name):
    values = {one: value for one, value in (SHAPE | CASES[name]).items() if value is not None}
    return resolve(build({"arch": name} | values), 1)[0]


def compare(name):
    """Assert that loss and gradients of one rank are those of transformers."""
    weights, rows, loss, gradients = theirs(name)
    worker = Worker(config_of(name), Grid(0), make("cpu", "float64"), Recorder())
    (stage,) = worker.stages.values()
    params = {their_name(param.name): param for param in stage.params}
    assert params.keys() == weights.keys()
    for key, param in params.items():
        param.data[...] = weights[key].reshape(param.shape)
    batches = [Batch(part[:, :-1].copy(), part[:, 1:].copy(), np.arange(part.shape[1] - 1))
               for part in np.split(rows, 2)]
    found, _, _ = worker.gradients(1, batches.__getitem__)
    assert_close(found, loss, TOL, "loss")
    assert_all_close({key: param.grad.reshape(gradients[key].shape)
                      for key, param in params.items()}, gradients, TOL)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient(name):
    compare(name)


def local_positions(monkeypatch):
    plain = Rotation.forward
    monkeypatch.setattr(Rotation, "forward",
                        lambda self, x, positions: plain(self, x, positions % 8))


def interleaved(monkeypatch):
    plain = NumpyOps._rotate

    def rotate(self, x, cos, sin):
        apart = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        plain(self, apart, cos, sin)
        half = apart.shape[-1] // 2
        x[..., ::2], x[..., 1::2] = apart[..., :half], apart[..., half:]

    monkeypatch.setattr(NumpyOps, "_rotate", rotate)


def heads_shifted(monkeypatch):
    """Keys and values of the next group, forward and backward."""
    split = Attention._split

    def next_group(self, packed):
        q, k, v = split(self, packed)
        return q, np.roll(k, 1, axis=2), np.roll(v, 1, axis=2)

    monkeypatch.setattr(Attention, "_split", next_group)


def gate_and_up_swapped(monkeypatch):
    plain = GatedFeedForward._gate_and_up
    monkeypatch.setattr(
        GatedFeedForward, "_gate_and_up",
        lambda self, x, stash: np.ascontiguousarray(plain(self, x, stash)[..., ::-1, :]))


def not_turned_back_on_dk(monkeypatch):
    def backward(self, dx, positions):
        heads = dx.shape[2] * 3 // 4  # those of q: three of four
        self.ops.rope_backward_input(dx[:, :, :heads], positions, self.table)

    monkeypatch.setattr(Rotation, "backward", backward)


@pytest.mark.parametrize("plant", [local_positions, interleaved, heads_shifted,
                                   gate_and_up_swapped, not_turned_back_on_dk])
def test_a_planted_bug_is_seen(monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="difference"):
        compare("llama")
