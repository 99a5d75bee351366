"""Tokenizers that the tests train themselves: nothing is downloaded."""

from __future__ import annotations

import json

import pytest

from mpipar.run.data.tokenizer import END

TEXTS = [
    "The cat sat on the mat.\n\n  \tIt's 12,345 o'clock! \u00e4\u00f6 \u4e2d\u6587 \U0001f600",
    "for i in range(10):\n    print(i)\n",
    " ",
    "a",
    "\n\n\n",
    f"a {END} b",
    "x" * 300,
    "\u0000\u007f\u00a0\u2028\ufeff",
]


def trained(vocab_size: int = 400):
    """A byte-level BPE over Python's own words, as an object of the library `tokenizers`."""
    tokenizers = pytest.importorskip("tokenizers", reason="text: tokenizers is not installed")
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([json.__doc__ * 3, pytest.__doc__ or "", str(json.__file__)], trainer)
    return made


def save_tokenizer(folder, vocab_size: int = 400):
    """Write a tokenizer.json of our own into a folder; return the library's object."""
    made = trained(vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


def save_like_gpt2(folder, vocab_size: int = 400):
    """Write vocab.json and merges.txt into a folder, the end of text as the last id, as GPT-2's."""
    made = json.loads(trained(vocab_size).to_str())["model"]
    vocabulary = {token: number - 1 for token, number in made["vocab"].items() if token != END}
    vocabulary[END] = len(vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(" ".join(pair) for pair in made["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")


def save_like_llama(folder):
    """Write a tokenizer.json as Llama 2's: blanks are letters, words are not cut apart, a first id.

    Of a letter that it does not know it gives the bytes.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="text: tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        max_token_length=16,
        special_tokens=["<pad>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    made.train_from_iterator(json.__doc__.split("\n"), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
