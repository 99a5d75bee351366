"""Greedy texts are those of transformers' own generate, of every form, in float64."""

import numpy as np
import pytest
from one_rank import loaded

torch = pytest.importorskip("torch", reason="peers: PyTorch is not installed")
pytest.importorskip("transformers", reason="peers: transformers is not installed")

from test_hugging_face import exact, theirs  # noqa: E402, F401 (a fixture)

from mpipar.inference.generate import STOP, Text, generate  # noqa: E402
from mpipar.inference.sampling import Sampling  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("exact")]
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
        found = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=NEW,
                               pad_token_id=0, **options)
    return found[:, longest:].tolist()


def our_texts(folder, prompts, stop=()):
    texts = [Text(number, list(prompt)) for number, prompt in enumerate(prompts)]
    for _ in generate(loaded(folder), texts, Sampling(NEW, stop=stop)):
        pass
    return texts


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "mixtral", "llama 3"])
def test_texts_of_prompts_of_any_length(name, tmp_path):
    model = lively(name)
    model.save_pretrained(tmp_path)
    expected = their_texts(model, PROMPTS)
    assert len(set(np.ravel(expected).tolist())) > 1, "a model that repeats itself shows little"
    for text, prompt, wanted in zip(our_texts(tmp_path, PROMPTS), PROMPTS, expected, strict=True):
        assert text.tokens == [*prompt, *wanted]


def test_texts_end_at_the_same_token(tmp_path):
    model = lively("llama")
    model.save_pretrained(tmp_path)
    free = their_texts(model, PROMPTS)
    stop = free[0][2]
    expected = their_texts(model, PROMPTS, eos_token_id=stop)
    for text, prompt, wanted in zip(
            our_texts(tmp_path, PROMPTS, (stop,)), PROMPTS, expected, strict=True):
        added = text.tokens[len(prompt):]
        assert added == wanted[:len(added)]
        assert (text.end == STOP) == (stop in wanted)
        assert set(wanted[len(added):]) <= {0}, "the rest is their padding"
