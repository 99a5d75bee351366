"""Generation without a cache, the reference of the tests: every token reruns its whole text."""

import numpy as np

from mpipar.layers.stash import Batch
from mpipar.run import generation
from mpipar.run.generation import Text, generate

# Shapes of the small model; 6 heads of width 4, one family with shared heads of keys and values.
FAMILIES = {
    "gpt2": {"arch": "gpt2"},
    "llama": {"arch": "llama", "kv_heads": 2},
    "qwen2": {"arch": "qwen2", "kv_heads": 1},
}
SHAPE = {
    "layers": 4,
    "d_model": 24,
    "heads": 6,
    "ffn": 31,
    "seq_len": 16,
    "vocab_size": 29,
    "tied": False,
}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3], [28, 0, 28, 0, 28]]


def enliven(worker):
    """Random weights whose texts do not repeat one token; the same model on every layout."""
    worker.initialize(0.3)
    for stage in worker.stages.values():
        for param in stage.params:
            if param.fill is None:
                param.data[...] *= 30


def whole_logits(alone, tokens):
    """Return the logits (V,) after the last token of a text, on one rank, without a cache."""
    batch = Batch(np.array([tokens]), None, np.arange(len(tokens)))
    return alone.forward([0], lambda mb: batch)[0][-1, : alone.config.model.vocab_size]


def without_cache(alone, prompt, sampling):
    """(the text that follows greedily, the logits of each of its tokens)."""
    tokens, logits = list(prompt), []
    for _ in range(min(sampling.num_tokens, alone.config.model.seq_len + 1 - len(prompt))):
        logits.append(whole_logits(alone, tokens))
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] in sampling.stop:
            break
    return tokens, logits


def with_cache(worker, prompts, sampling, monkeypatch):
    """(texts, {(number, place in the text): logits of this rank}) of all prompts at one time."""
    seen, dealt = {}, {}
    texts = [Text(number, list(prompt)) for number, prompt in enumerate(prompts)]
    plain_deal, plain_forward = generation.deal, worker.forward

    def deal(*arguments):
        dealt.update(plain_deal(*arguments))
        return dict(dealt)

    def forward(mbs, get_batch, caches):
        outputs = plain_forward(mbs, get_batch, caches)
        seen.update(
            ((text.number, len(text.tokens)), row)
            for mb, logits in outputs.items()
            for text, row in zip(dealt[mb].own, logits, strict=True)
            if not text.end
        )
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(generation, "deal", deal)
        patch.setattr(worker, "forward", forward)
        for _ in generate(worker, texts, sampling):
            pass
    return texts, seen
