"""Trains a tokenizer: byte pair encoding of bytes, cut into words as GPT-2 cuts them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mpipar.data.tokenizer import BYTES, END, SETTINGS, TOKENIZER, library_of, settings_file

LEAST_IDS, MOST_IDS = BYTES + 2, 1 << 20  # bytes, the end of a text, and one merge at least


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train on these texts, and write the tokenizer's files into a folder that exists.

    The end of text is id 0, the bytes follow, and then the pairs in the order in which they were
    merged. A short text may have fewer than vocab_size of them. Raises EnvironmentProblem without
    the library `tokenizers`, and OSError.
    """
    tokenizers = library_of("--tokenizer train")
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=level.alphabet(),
        show_progress=False))
    (folder / TOKENIZER).write_text(made.to_str(pretty=True), encoding="utf-8")
    (folder / SETTINGS).write_bytes(settings_file(end=True))
