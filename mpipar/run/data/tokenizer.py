"""Text to token ids and back: bytes, ids written as words, or the files of a tokenizer.

A tokenizer is a set of files beside the weights, as Hugging Face's libraries write them:
tokenizer.json, or GPT-2's vocab.json and merges.txt. The byte tokenizer has such a file too, so
that other programs can use a model of bytes. All other files are read by the library `tokenizers`
(the extra `text`), which is imported when it is needed. Whatever it raises, also where it panics,
is a DataError. Nothing is downloaded.
"""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpipar.config.text import brief
from mpipar.errors import DataError, EnvironmentProblem, UserError
from mpipar.run.files.bounded import (
    BYTE_ORDER_MARK,
    HEAD,
    built,
    parse_json,
    problems_as,
    read_bytes,
    recognized,
)

TOKENIZER, SETTINGS, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
# The files of a tokenizer, as transformers looks for them; those that exist are copied.
FILES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    ADDED,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
MOST_BYTES = 128 << 20  # of one file; the largest known one has about 35 MB
MOST_IDS = 1 << 24  # the largest known vocabulary has about 260,000 ids
MOST_GROWTH = 256  # characters that a tokenizer may make of one
MOST_TEMPLATE = 1 << 15  # bytes of what describes the tokens around a text
NEW_TEXT = re.compile(r'"(?:content|prepend)":"((?:[^"\\]|\\.)*)"')  # in a normalizer or decoder
END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")  # looked for if no file says which one it is
BYTES = 256
BYTE_VOCABULARY = 512  # a model with more ids, including padding, is not one of bytes


@dataclass(frozen=True)
class Tokenizer:
    """The byte tokenizer, with ids 0 to 255, and the base of the others.

    size: ids in the vocabulary. end: the id that ends a document, or None. files: {name: content}
    of its files. what: a name for the user. takes: what a prompt may be, for the user. least: the
    least vocabulary of a model with it, whose table may lack rows of bytes that no text has, and of
    added tokens, such as one for padding; only a text that has such an id is refused.
    """

    takes = "a model of bytes takes text"

    size: int = BYTES
    end: int | None = None
    files: dict[str, bytes] = field(default_factory=dict, repr=False)
    what: str = "bytes"
    least: int = 1

    @property
    def is_bytes(self) -> bool:
        """Whether each id is a byte, except for an end of text."""
        return self.what == "bytes"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; what looks like a special token in it is ordinary text."""
        return self.encode_all([text])[0].tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Return a prompt's ids as transformers does: with special tokens, also at the start."""
        return self.encode(text)

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of many texts, using all threads."""
        typed = (text.encode("utf-8", "surrogateescape") for text in texts)  # the same bytes
        return [np.frombuffer(one, np.uint8) for one in typed]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, with special tokens; invalid UTF-8 becomes replacement marks."""
        special = {self.end: END.encode()}
        return b"".join(
            bytes([one]) if one < BYTES else special.get(one, b"") for one in map(int, ids)
        ).decode(errors="replace")


class Ids(Tokenizer):
    """Ids written as words: without a known tokenizer, a model reads and writes `464 318`."""

    takes = "a model without the files of a tokenizer takes ids, as in --prompt '464 318'"

    def encode(self, text: str) -> list[int]:
        words = text.split()  # a word with more digits than an id is not one, and may be endless
        return (
            [int(word) for word in words]
            if all(word.isdecimal() and len(word) < 20 for word in words)
            else []
        )

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class HuggingFace(Tokenizer):
    """A tokenizer read by the library `tokenizers`. library: its object."""

    takes = "give text"
    library: object = field(default=None, repr=False)

    def encode_prompt(self, text: str) -> list[int]:
        self.library.encode_special_tokens = False
        with asked(self.what):
            return self.library.encode(text).ids

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        self.library.encode_special_tokens = True
        with asked(self.what):
            found = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in found]

    def decode(self, ids: Iterable[int]) -> str:
        with asked(self.what):
            return self.library.decode(list(map(int, ids)), skip_special_tokens=False)


@contextmanager
def asked(what: str) -> Iterator[None]:
    """Turn whatever is raised inside, also by the library, into a DataError of one sentence."""
    try:
        yield
    except BaseException as error:
        # A panic of the library, which has no class to import, is no Exception.
        is_theirs = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not is_theirs:
            raise
        raise DataError(
            f"{what}: this tokenizer cannot be used: {brief(str(error), 200)}"
        ) from None


def byte_tokenizer(end: bool = False) -> Tokenizer:
    """Return the tokenizer of bytes, with one more id that ends a document if `end`."""
    files = {TOKENIZER: _byte_file(end), SETTINGS: settings_file(end)}
    return Tokenizer(BYTES + end, BYTES if end else None, files)


def load_tokenizer(path) -> Tokenizer:
    """Return the tokenizer of a folder with Hugging Face's files, or of a single tokenizer.json.

    Raises DataError for unusable files, and EnvironmentProblem without the library.
    """
    files = read_files(path)
    if not can_be_read(files):
        cure = "; tokenizer.model alone cannot be read: let transformers save it as"
        raise DataError(
            f"{path}: no tokenizer here (looked for {TOKENIZER}, and for vocab.json"
            f" with merges.txt){f'{cure} {TOKENIZER}' * ('tokenizer.model' in files)}"
        )
    for of_bytes in (byte_tokenizer(), byte_tokenizer(end=True)):
        if files.get(TOKENIZER) == of_bytes.files[TOKENIZER]:
            return of_bytes
    with asked(str(path)):
        library = _library(path, files)
        size, own = (
            max(library.get_vocab(with_added_tokens=added).values(), default=-1) + 1
            for added in (True, False)
        )
        if not 1 < size <= MOST_IDS:
            raise ValueError(f"it has {size:,} ids; 2 to {MOST_IDS:,} are supported")
        end = _end(files, library)
    return HuggingFace(size, end, files, f"tokenizer of {path}", own, library)


def files_digest(files: dict[str, bytes]) -> str:
    """Return the SHA-256 of the files' names, sizes and contents."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def can_be_read(files: dict[str, bytes]) -> bool:
    """Return whether these are the files of a tokenizer that is known here."""
    return TOKENIZER in files or {"vocab.json", "merges.txt"} <= files.keys()


def tokenizer_of(folder: Path | None, vocab_size: int, is_text: bool = False) -> Tokenizer:
    """Return the tokenizer of the model in a folder; without files, bytes for 256 ids, else ids.

    is_text: whether the model is trained on text without a tokenizer, and so on bytes.
    Raises as `load_tokenizer` does, and DataError if it has more ids than the model.
    """
    files = read_files(folder) if folder and os.path.isdir(folder) else {}
    if not files and (is_text or vocab_size == BYTES):
        return byte_tokenizer()
    if not is_text and not can_be_read(files):
        return Ids(vocab_size, what="ids")
    found = load_tokenizer(folder)
    if is_text and not found.is_bytes:
        raise DataError(
            f"--data: text is trained as bytes, but these weights have a tokenizer of their own;"
            f" type mpipar data prepare TEXT... --tokenizer {folder} --out DATA, and --data DATA"
        )
    if found.least > vocab_size:
        raise DataError(
            f"{folder}: its tokenizer has {found.least:,} ids, more than the model's"
            f" vocabulary of {vocab_size:,}; give the tokenizer of this model"
        )
    return found


def read_files(path) -> dict[str, bytes]:
    """Return the content of each tokenizer file in a folder, or of one file, by its name."""
    path, found = Path(path), {}
    files = {TOKENIZER: path} if os.path.isfile(path) else {name: path / name for name in FILES}
    for name, file in files.items():
        if os.path.exists(file):
            with problems_as(DataError, str(file)):
                found[name] = read_bytes(file, most_bytes=MOST_BYTES)
                kind = recognized(found[name][:HEAD], len(found[name]))
                if name.endswith((".json", ".txt")) and kind not in (None, BYTE_ORDER_MARK):
                    raise ValueError(f"is {kind}")
    return found


def library_of(where):
    """Return the library `tokenizers`; if it is missing, raise EnvironmentProblem about `where`."""
    try:
        import tokenizers
    except ImportError:
        raise EnvironmentProblem(
            f"{where}: this needs the library tokenizers, which is not installed:"
            " pip install '.[text]'"
        ) from None
    return tokenizers


def _library(path: Path, files: dict[str, bytes]):
    """Return the library's object for the files of a tokenizer. Raises what the library does."""
    tokenizers = library_of(path)
    if TOKENIZER in files:
        library = tokenizers.Tokenizer.from_str(_text(files[TOKENIZER]))
    else:
        library = _of_gpt2(tokenizers, files)
    library.no_truncation()
    library.no_padding()
    if hasattr(library.model, "dropout"):
        library.model.dropout = None  # chance: for the training of other programs
    _add_named(tokenizers, library, files)
    kinds = (library.normalizer, library.decoder, library.post_processor)
    *texts, template = [bytes(one.__getstate__()).decode() if one else "" for one in kinds]
    growth = max(math.prod(max(1, len(new)) for new in NEW_TEXT.findall(one)) for one in texts)
    if growth > MOST_GROWTH or len(template) > MOST_TEMPLATE:
        raise ValueError(
            f"it can make more than {MOST_GROWTH} characters or ids of one, so a text has no bound"
        )
    return library


def _of_gpt2(tokenizers, files: dict[str, bytes]):
    """Return the library's object for GPT-2's two files, as transformers reads them."""
    vocabulary = _json(files, "vocab.json")
    lines = _text(files["merges.txt"]).replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    library = byte_level(tokenizers, vocabulary, merges)
    if END in vocabulary:
        library.add_special_tokens([END])
    return library


def byte_level(tokenizers, *model):
    """Return the library's object with GPT-2's word splitting. model: vocabulary and merges."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(*model))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def _add_named(tokenizers, library, files: dict[str, bytes]) -> None:
    """Add the tokens that only added_tokens.json or tokenizer_config.json names, with their ids.

    Raises what the library does if an entry names no token, and ValueError if such a file gives a
    token another id than the tokenizer does.
    """
    added = _json(files, ADDED).items()
    named = {int(place): {"content": token, "special": True} for token, place in added}
    more = _json(files, SETTINGS).get("added_tokens_decoder") or {}
    named |= built(dict[int, dict], more, "added_tokens_decoder")
    for place, token in sorted(named.items()):
        if library.token_to_id(token["content"]) is None:
            options = {name: value for name, value in token.items() if type(value) is bool}
            library.add_tokens([tokenizers.AddedToken(token["content"], **options)])
        if (found := library.token_to_id(token["content"])) != place:
            raise ValueError(
                f"its files give the token {brief(token['content'])} the id {place:,}, and it gives"
                f" {found}; let transformers save it again"
            )


def _text(content: bytes) -> str:
    """Return the text of a file without its byte order mark; what is not UTF-8 is marked."""
    return content.decode(errors="replace").removeprefix("\ufeff")


def _json(files: dict[str, bytes], name: str) -> dict:
    """Return the object in a JSON file, {} without it. Raises ValueError."""
    return built(dict, parse_json(_text(files.get(name, b"{}"))), name)


def settings_file(end: bool) -> bytes:
    """Return a tokenizer_config.json. end: whether the vocabulary has the end of text."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return json.dumps(found | ({"eos_token": END} if end else {}), indent=1).encode()


def _byte_file(end: bool) -> bytes:
    """Return a tokenizer.json of bytes, each written as the letter that GPT-2's files use for it.

    A byte that is a visible letter of Latin-1 stands for itself; the others take the letters from
    U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(BYTES)
    vocabulary = {chr(one if one in visible else next(others)): one for one in range(BYTES)}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    special = {
        "id": BYTES,
        "content": END,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [special] if end else [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    ).encode()


def _end(files: dict[str, bytes], library) -> int | None:
    """Return the id that ends a text: as the files say, else a known special token, or None."""
    for name in (SETTINGS, "special_tokens_map.json"):
        named = _json(files, name).get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str) and (found := library.token_to_id(named)) is not None:
            return found
    special = {token.content: place for place, token in library.get_added_tokens_decoder().items()}
    return next((special[name] for name in ENDS if name in special), None)
