"""Every form of weights against transformers: imported, computed, trained, continued, exported."""

import math

import numpy as np
import pytest
from helpers import assert_all_close, assert_close
from one_rank import loaded, logits

from mpipar.layers.parallel.local_attention import LocalAttention
from mpipar.layers.rotation import Rotation
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.formats import format_of
from mpipar.run.checkpoint.weight_files import WeightFiles
from mpipar.run.generation import Sampling, Text, generate
from mpipar.train.optim import learning_rate

torch = pytest.importorskip("torch", reason="peers: PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="peers: transformers is not installed")
pytestmark = pytest.mark.peers

T = 9  # tokens of a row
STEPS = 6
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
SIZES = {
    "vocab_size": 29,
    "hidden_size": 12,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 12,
}
MODELS = {
    "llama": ("Llama", {"head_dim": 6, "rms_norm_eps": 1e-5}),
    "llama 3": (
        "Llama",
        {
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "head_dim": 2,
            "eos_token_id": [2, 7],
        },
    ),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 4}),
    "mistral": (
        "Mistral",
        {
            "head_dim": 8,
            "sliding_window": 40,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "mistral, tied": (
        "Mistral",
        {
            "head_dim": 4,
            "sliding_window": None,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2", {"hidden_size": 16, "num_key_value_heads": 4}),
    "qwen2, tied": (
        "Qwen2",
        {"hidden_size": 24, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "mixtral": (
        "Mixtral",
        {
            "num_local_experts": 4,
            "head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        },
    ),
    "mixtral, tied": (
        "Mixtral",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 4,
            "sliding_window": 40,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 12,
            "n_head": 3,
            "n_layer": 2,
            "n_positions": T + 4,
            "n_inner": 22,
            "vocab_size": 29,
            "layer_norm_epsilon": 1e-6,
        },
    ),
}


def theirs(name, dtype=torch.float64):
    """A random model of transformers; no norm's weight is 1 and no bias 0."""
    kind, values = MODELS[name]
    values = EAGER | (values if kind == "GPT2" else SIZES | values)
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
    for kind in ("llama", "mistral", "qwen2", "mixtral"):
        monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.torch", Float64Torch())
        monkeypatch.setattr(
            f"transformers.models.{kind}.modeling_{kind}.nn.functional.softmax",
            lambda x, dim, dtype=None: torch.softmax(x, dim),
        )
    monkeypatch.setattr("transformers.modeling_rope_utils.torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def read_back(folder, dtype=torch.float64):
    """The model that transformers makes of a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER)
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


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_adamw(name, rng, tmp_path):
    """Loss, norm, every gradient, and every weight after six steps, to 1e-9.

    Those of Mixtral's router are among them; nothing balances its experts.
    """
    model = theirs(name)
    model.save_pretrained(tmp_path)
    worker = loaded(
        tmp_path,
        "float64",
        "--seq-len",
        str(T),
        *(["--router-balance", "none"] if "mixtral" in name else []),
    )
    rows, train = rows_of(rng, model.config.vocab_size), worker.config.train
    batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), np.arange(T))
    assert train.optimizer == "adamw"
    assert train.weight_decay > 0
    found = theirs_after(model, train, rows)
    loss, norm, _ = worker.gradients(1, lambda mb: batch)
    assert_close(loss, found["losses"][0], 1e-9, "loss")
    assert_close(norm, found["norms"][0], 1e-9, "norm")
    assert_all_close(in_files(worker, "grad"), found["gradients"], 1e-9)
    results = [worker.train_step(step, lambda mb: batch) for step in range(1, STEPS + 1)]
    assert_close([one.loss for one in results], found["losses"], 1e-9, "losses")
    assert_close([one.grad_norm for one in results], found["norms"], 1e-9, "norms of the steps")
    assert_all_close(in_files(worker, "master"), found["weights"], 1e-9)


def local_positions(monkeypatch):
    plain = Rotation.forward
    monkeypatch.setattr(
        Rotation, "forward", lambda self, x, positions: plain(self, x, positions % 8)
    )


def heads_shifted(monkeypatch):
    """Keys and values of the next group."""
    plain = LocalAttention.forward

    def next_group(self, q, k, v, batch):
        if isinstance(k, np.ndarray):  # not in the step on shapes
            k, v = np.roll(k, 1, axis=2), np.roll(v, 1, axis=2)
        return plain(self, q, k, v, batch)

    monkeypatch.setattr(LocalAttention, "forward", next_group)


def not_turned_back_on_dk(monkeypatch):
    def backward(self, dx, positions):
        heads = dx.shape[2] * 2 // 3  # those of q: two of three
        self.ops.rope_backward_input(dx[:, :, :heads], positions, self.table)

    monkeypatch.setattr(Rotation, "backward", backward)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "plant",
    [local_positions, heads_shifted, not_turned_back_on_dk],
)
def test_a_planted_bug_is_seen(plant, rng, tmp_path, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="difference"):
        test_steps_of_adamw("llama", rng, tmp_path)


def theirs_after(model, train, rows):
    """Losses, norms, the first gradients, and the weights of steps of transformers and PyTorch."""
    ids, found = torch.tensor(rows), {"losses": [], "norms": []}
    weights = dict(model.named_parameters())
    groups = [
        {"params": [w for w in weights.values() if w.ndim > 1]},
        {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay
    )
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        found["losses"].append(loss.item())
        if step == 1:
            found["gradients"] = apart_in_files(
                {name: w.grad.numpy().copy() for name, w in weights.items()}
            )
        found["norms"].append(torch.nn.utils.clip_grad_norm_(weights.values(), train.clip).item())
        optimizer.step()
    return found | {
        "weights": apart_in_files({name: w.detach().numpy() for name, w in weights.items()})
    }


FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}  # by what ends its name in memory


def apart_in_files(tensors):
    """The same tensors by their names in files, where each matrix of an expert has its own."""
    found = {}
    for name, x in tensors.items():
        start, *kind = name.split(".mlp.experts.")
        if not kind:
            found[name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")] = x
            continue
        keys = FUSED[kind[0]]
        for expert, matrices in enumerate(x):
            for key, part in zip(keys, np.split(matrices, len(keys)), strict=True):
                found[f"{start}.block_sparse_moe.experts.{expert}.{key}.weight"] = part
    return found


def in_files(worker, kind):
    """{name in a file: weights or gradients in the file's shape} of one rank."""
    form, found = format_of(worker.config.model), {}
    for param in worker.stages[0].params:
        rest = getattr(param, kind).reshape(-1)
        for name, shape in form.tensors(param).items():
            part, rest = np.split(rest, [math.prod(shape)])
            found[name] = part.reshape(shape).copy()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_files_there_and_back_byte_for_byte(name, dtype, tmp_path):
    kind = getattr(torch, dtype)
    model = theirs(name, kind)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    worker = loaded(tmp_path / "theirs", "float32", "--seq-len", str(T))
    checkpoint.write(
        tmp_path / "ours",
        worker.config.model,
        np.dtype(dtype),
        (block for _, block in checkpoint.stream(worker, "master")),
    )
    with (
        WeightFiles(tmp_path / "theirs") as files,
        WeightFiles(tmp_path / "ours") as own,
    ):
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
        assert own.tensors.keys() == files.tensors.keys()
        for key, entry in files.tensors.items():
            assert own.tensors[key] == entry, key
            found, expected = (one.slices[key][:] for one in (own, files))
            assert found.tobytes() == expected.tobytes(), key
    ids = torch.arange(T)[None]
    again = read_back(tmp_path / "ours", kind)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


# --- greedy texts are those of transformers' own generate


PROMPTS = [[3, 17, 4], [5], [11, 28, 3, 9]]
NEW = 5  # with the longest prompt as many as GPT-2's table of positions takes


def lively(name):
    """A random model whose texts do not repeat one token."""
    model = theirs(name)
    model.generation_config.eos_token_id = None
    if name == "gpt2":
        with torch.no_grad():
            for weight in (one for one in model.parameters() if one.ndim > 1):
                weight.mul_(20)
            model.transformer.wte.weight.mul_(0.2)
    return model


def their_texts(model, prompts, **options):
    """What follows each prompt, which is padded before its start."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=NEW, pad_token_id=0, **options
        )
    return found[:, longest:].tolist()


def our_texts(folder, prompts, stop=()):
    texts = [Text(number, list(prompt)) for number, prompt in enumerate(prompts)]
    for _ in generate(loaded(folder), texts, Sampling(NEW, stop=stop)):
        pass
    return texts


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "mixtral", "llama 3"])
def test_texts_of_prompts_of_any_length(name, tmp_path):
    model = lively(name)
    model.save_pretrained(tmp_path)
    expected = their_texts(model, PROMPTS)
    assert len(set(np.ravel(expected).tolist())) > 1, "a model that repeats itself shows little"
    for text, prompt, wanted in zip(our_texts(tmp_path, PROMPTS), PROMPTS, expected, strict=True):
        assert text.tokens == [*prompt, *wanted]
