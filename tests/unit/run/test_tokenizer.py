"""Text to ids and back: a tokenizer's files, bytes, and how transformers reads them."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import TEXTS, save_like_gpt2, save_like_llama, save_tokenizer

from mpipar.config.model import ModelConfig
from mpipar.errors import DataError, EnvironmentProblem, UsageError
from mpipar.run.checkpoint.weights import write_tokenizer_files
from mpipar.run.data.tokenizer import (
    END,
    MOST_IDS,
    byte_tokenizer,
    load_tokenizer,
    tokenizer_of,
)
from mpipar.run.generation import encode_prompts


@given(st.text())
def test_bytes_round_trip(text):
    for tokenizer in (byte_tokenizer(), byte_tokenizer(end=True)):
        ids = tokenizer.encode(text)
        assert bytes(ids) == text.encode()
        assert tokenizer.decode(ids) == text
        np.testing.assert_array_equal(tokenizer.encode_all([text, ""])[0], ids)


def test_bytes_have_a_file_that_is_known_again(tmp_path):
    for end, size in ((False, 256), (True, 257)):
        folder, made = tmp_path / str(size), byte_tokenizer(end)
        folder.mkdir()
        write_tokenizer_files(made.files, folder)
        found = load_tokenizer(folder)
        assert (found.size, found.end, found.what) == (size, 256 if end else None, "bytes")
        assert found.files == made.files
    assert byte_tokenizer(True).decode([104, 256, 105, 300]) == f"h{END}i"
    assert byte_tokenizer().decode([104, 0xE4, 256]) == "h\ufffd"


def prompt_ids(tokenizer, prompt, vocab_size):
    model = ModelConfig(vocab_size=vocab_size)
    return encode_prompts(tokenizer, [("--prompt", prompt)], model)[0].ids


def test_a_model_without_files_takes_bytes_or_ids():
    assert tokenizer_of(None, 256).encode("a\n") == [97, 10]
    assert tokenizer_of(None, 300, is_text=True).encode("5") == [53]
    ids, of_bytes = tokenizer_of(None, 257), tokenizer_of(None, 128, is_text=True)
    assert ids.encode("5 9") == [5, 9]
    assert ids.decode([464, 318]) == "464 318"
    assert prompt_ids(ids, "46 31", 257) == [46, 31]
    for tokenizer, prompt, words in [
        *((ids, prompt, "takes ids") for prompt in ("Hello", "257", "", "9" * 5000)),
        *((of_bytes, prompt, "takes text") for prompt in ("", "\xff")),
    ]:
        with pytest.raises(UsageError, match=words):
            prompt_ids(tokenizer, prompt, 257 if tokenizer is ids else 128)


def test_without_the_library(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install '\.\[text\]'"):
        load_tokenizer(tmp_path)
    write_tokenizer_files(byte_tokenizer().files, tmp_path)
    assert load_tokenizer(tmp_path).what == "bytes"  # needs no library


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    for path, words in ((tmp_path, "tokenizer.model alone"), (tmp_path / "no", "no tokenizer")):
        with pytest.raises(DataError, match=words):
            load_tokenizer(path)
    assert tokenizer_of(tmp_path, 256).decode([104]) == "104", "whose ids are no bytes"
    with pytest.raises(DataError, match=r"tokenizer\.model alone"):
        tokenizer_of(tmp_path, 256, is_text=True)


@pytest.mark.text
@pytest.mark.parametrize("save", [save_tokenizer, save_like_gpt2])
def test_ids_are_those_of_transformers(save, tmp_path):
    save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    transformers = pytest.importorskip("transformers", reason="text: transformers is missing")
    kind = (
        transformers.GPT2TokenizerFast
        if save is save_like_gpt2
        else transformers.PreTrainedTokenizerFast
    )
    theirs = kind.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.size == 400
    assert theirs.convert_tokens_to_ids(END) == tokenizer.end == (399 * (save is save_like_gpt2))
    for text in TEXTS:
        assert tokenizer.encode_prompt(text) == theirs(text)["input_ids"], text
        plain = theirs(text, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == tokenizer.encode_all([text])[0].tolist(), text
        if END not in text:
            assert tokenizer.encode(text) == plain, text
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(plain) == theirs.decode(plain)
    assert tokenizer.end not in tokenizer.encode(f"a{END}b")
    assert tokenizer.end in tokenizer.encode_prompt(f"a{END}b")


@pytest.mark.text
def test_a_prompt_begins_as_the_files_say(tmp_path):
    """Llama's tokenizers put an id before a prompt; no document of the data has it."""
    transformers = pytest.importorskip("transformers", reason="text: transformers is missing")
    save_like_llama(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        assert tokenizer.encode_prompt(text) == expected
        assert [1, *tokenizer.encode(text)] == expected
        assert tokenizer.decode(expected[1:]) == theirs.decode(expected[1:])
    assert tokenizer.end == 2


@pytest.mark.text
def test_transformers_reads_the_file_of_bytes(tmp_path):
    transformers = pytest.importorskip("transformers", reason="text: transformers is missing")
    write_tokenizer_files(byte_tokenizer(end=True).files, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.eos_token_id) == (257, 256)
    for text in TEXTS:
        if END not in text:
            assert theirs(text)["input_ids"] == list(text.encode())
            assert theirs.decode(list(text.encode())) == text


@pytest.mark.text
def test_an_end_of_text_with_options(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "e"}}')
    found = load_tokenizer(tmp_path)
    assert [found.end] == found.encode("e")
    with pytest.raises(DataError, match="400 ids, more than the model's vocabulary of 300"):
        tokenizer_of(tmp_path, 300)


# --- files of others: what the library cannot use, what has no bound, and tokens named beside

PANIC = {"type": "FixedLength", "length": 0}
PIECES = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": PIECES, "pair": [], "special_tokens": {}}
GROWS = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
}
DECODER_GROWS = {
    "type": "Sequence",
    "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}] * 9,
}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -1.0]]}


def bpe(**vocabulary):
    """The part of a tokenizer.json that says which ids there are."""
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}


def split(pattern):
    """The part of a tokenizer.json that cuts a text where a pattern fits."""
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": part}


def changed_file(folder, parts):
    """Write a tokenizer.json with some of its parts changed into a folder."""
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


@pytest.mark.text
@pytest.mark.parametrize(("name", "content"), [
    *(("tokenizer.json", content) for content in (b"", b"\0", b"[]", b"{}", b"[" * 100_000)),
    ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"),
    ("tokenizer.json", "{}".encode("utf-16")), ("vocab.json", b"[]"), ("vocab.json", b"{"),
    ("vocab.json", b'{"a": "b"}'), ("merges.txt", b"a b c\n"), ("merges.txt", b"a zzzz\n"),
    ("merges.txt", b"\x1f\x8b\x08"), ("added_tokens.json", b'{"<pad>": 407}'),
    ("added_tokens.json", b"[]"), ("added_tokens.json", b'{"<pad>": "a"}'),
    ("special_tokens_map.json", b"[]"), ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
    *(("tokenizer_config.json", b'{"added_tokens_decoder": {%s}}' % entry) for entry in (
        b'"x": {"content": "a"}', b'"400": 5', b'"401": {}', b'"402": {"content": null}',
    )),
    *(("", parts) for parts in (
        bpe(), bpe(a=0, b=MOST_IDS), {"pre_tokenizer": PANIC}, {"post_processor": TEMPLATE},
        {"normalizer": GROWS}, {"decoder": DECODER_GROWS}, {"model": UNIGRAM, "added_tokens": []},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}},
        {"post_processor": TEMPLATE | {"single": PIECES[1:] * 9000}},
        split("(("), split("(x+x+)+(?!x)y|(x|xx)+$"),
    )),
])  # fmt: skip
def test_files_that_are_no_tokenizer_end_with_one_sentence(name, content, tmp_path):
    """Also a panic, which is no Exception; what could grow without bound is refused before."""
    if name in ("vocab.json", "merges.txt"):
        save_like_gpt2(tmp_path)
    else:
        changed_file(tmp_path, {} if name else content)
    if name:
        (tmp_path / name).write_bytes(content)

    def used():
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.decode(tokenizer.encode_prompt("The cat " + "x" * 5000 + "!"))

    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        used()
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


@pytest.mark.text
def test_no_ids_depend_on_chance(tmp_path):
    model = json.loads(save_tokenizer(tmp_path).to_str())["model"]
    expected = load_tokenizer(tmp_path).encode(TEXTS[0])
    changed_file(tmp_path, {"model": model | {"dropout": 0.9}})
    assert [load_tokenizer(tmp_path).encode(TEXTS[0]) for _ in range(5)] == [expected] * 5


ROLE = {"content": "<|role|>", "special": True}
PAD = {"content": "<pad>", "lstrip": None, "__type": "AddedToken"}


@pytest.mark.text
@pytest.mark.parametrize("save", [save_tokenizer, save_like_gpt2])
@pytest.mark.parametrize(("name", "content"), [
    ("tokenizer_config.json", {"added_tokens_decoder": {"400": ROLE, "401": PAD}}),
    ("added_tokens.json", {"<pad>": 401, "<|role|>": 400}),
])  # fmt: skip
def test_tokens_that_are_only_named_beside_the_tokenizer(save, name, content, tmp_path):
    save(tmp_path)
    before = load_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.size == 402
    assert tokenizer.encode_prompt("a<|role|>b<pad>") == [
        *before.encode("a"), 400, *before.encode("b"), 401
    ]  # fmt: skip
    assert tokenizer.decode([400, 401]) == "<|role|><pad>"
    assert 400 not in tokenizer.encode("a<|role|>b"), "in a text it is ordinary text"
    assert tokenizer_of(tmp_path, 400).size == 402, "a model may have no rows for added tokens"
    with pytest.raises(UsageError, match="all below the model's vocabulary of 400"):
        prompt_ids(tokenizer, "<pad>", 400)


@pytest.mark.text
def test_files_that_other_systems_wrote(tmp_path):
    """A byte order mark, and merges with CRLF."""
    save_like_gpt2(tmp_path)
    expected = load_tokenizer(tmp_path).encode(TEXTS[0])
    for name in ("vocab.json", "merges.txt"):
        content = (tmp_path / name).read_bytes().replace(b"\n", b"\r\n")
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert load_tokenizer(tmp_path).encode(TEXTS[0]) == expected
