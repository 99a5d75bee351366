"""Prompts, typed or from a file, and the text that a model generates from them."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import DataError, UsageError
from mpipar.run.data.documents import check_kind
from mpipar.run.data.tokenizer import Tokenizer
from mpipar.run.files.bounded import problems_as, read_text
from mpipar.run.inference.generate import STOP, Text

MOST_BYTES = 64 << 20  # of a file of prompts
MOST_PROBLEMS = 10  # listed for a file of prompts


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was typed, and its tokens."""

    typed: str
    ids: list[int]


def read_prompts(path: str) -> list[tuple[str, str]]:
    """Return (place, text) of each prompt in a file, one per line; blank lines are skipped.

    Raises DataError.
    """
    with problems_as(DataError, path):
        check_kind(Path(path))
        text = read_text(path, most_bytes=MOST_BYTES).replace("\r\n", "\n")
    found = [(f"{path}: line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
    found = [(where, line) for where, line in found if line.strip()]
    if not found:
        raise DataError(f"{path}: has no prompt; write one on each line")
    return found


def encode_prompts(tokenizer: Tokenizer, texts, model) -> list[Prompt]:
    """Return the prompts of [(where, text)]; raise one UsageError for all misfits.

    model: a ModelConfig.
    """
    found, problems = [], []
    for where, text in texts:
        ids = tokenizer.encode_prompt(text)
        found.append(Prompt(text, ids))
        if not ids or max(ids) >= model.vocab_size:
            problems.append(
                f"{where}: needs at least one token, all below the model's vocabulary of"
                f" {model.vocab_size:,}; {tokenizer.takes}"
            )
        elif len(ids) > model.seq_len:
            problems.append(
                f"{where}: has {len(ids):,} tokens, but the model reads at most"
                f" {model.seq_len:,} (its --seq-len): shorten it"
            )
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise UsageError(problems[:MOST_PROBLEMS] + [f"and {more:,} more"] * (more > 0))
    return found


def show(prompt: list[int], tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the prompt's text and what each token adds to it; together they are the whole text.

    The last bytes may be part of a character that later tokens complete, so they wait for them. A
    tokenizer shows such bytes as one replacement mark, or, with byte fallback, as one for each.
    """
    seen, shown = prompt[:-1], 0
    for token in itertools.chain(prompt[-1:], tokens):
        seen.append(token)
        text = tokenizer.decode(seen)
        ready = max(shown, len(text.rstrip("\ufffd")))
        yield text[shown:ready]
        shown = ready
    yield tokenizer.decode(seen)[shown:]


def visible(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the prompt's tokens without those that the tokenizer puts before every text."""
    own = tokenizer.encode(prompt.typed)
    before = len(prompt.ids) - len(own)
    return own if own and before > 0 and prompt.ids[before:] == own else prompt.ids


def answer(tokenizer: Tokenizer, prompt: Prompt, text: Text) -> dict:
    """Return one answer of --prompts: prompt, continuation, its tokens, and why it ended."""
    added = text.tokens[len(prompt.ids) :]
    spoken = added[:-1] if text.end == STOP else added
    before = visible(tokenizer, prompt)
    shown = len(tokenizer.decode(before).rstrip("\ufffd"))  # the rest may become a character
    return {
        "prompt": prompt.typed,
        "text": tokenizer.decode([*before, *spoken])[shown:],
        "tokens": added,
        "end": text.end,
    }
