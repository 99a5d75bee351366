"""Documents of files: separators across pieces, long documents, JSON lines, and what is none."""

import gzip
import json
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made import save_like_llama, save_tokenizer

from mpipar.errors import DataError
from mpipar.run.data import documents as documents_module
from mpipar.run.data.documents import is_held_out, read_documents
from mpipar.run.data.tokenizer import load_tokenizer

LETTERS = st.text(alphabet="ab-\u00e4\u4e2d\U0001f600 \n", max_size=60)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def in_pieces(text, sizes):
    """The text in pieces of these lengths, over and over."""
    found, first = [], 0
    while first < len(text):
        size = sizes[len(found) % len(sizes)]
        found.append(text[first : first + size])
        first += size
    return found


def parts_of(pieces, separator=None, longest=1 << 20):
    """The parts of each document of a text that comes in pieces; longest: characters of a part."""
    found = [[]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "LONGEST", longest)
        for text, ends in documents_module._split(pieces, separator, Counter()):
            found[-1].append(text)
            if ends:
                found.append([])
    assert found.pop() == []
    return found


@given(
    text=LETTERS,
    sizes=SIZES,
    separator=st.sampled_from(["-", "--", "-a-", "aa", "\u4e2d"]),
    longest=st.integers(1, 70),
)
def test_a_separator_may_lie_across_pieces_and_parts(text, sizes, separator, longest):
    found = parts_of(in_pieces(text, sizes), separator, longest)
    assert ["".join(one) for one in found] == text.split(separator)


def read(path, *args):
    """The text of each document of a file, and how many bytes were reported."""
    found, text, seen = [], "", []
    for piece, ends in read_documents(path, *args, progress=seen.append):
        text += piece
        if ends:
            found.append(text)
            text = ""
    assert text == ""
    assert sum(seen) == path.stat().st_size
    return found


def test_documents_are_files_or_what_is_between_separators(tmp_path):
    path = tmp_path / "a.txt"
    for text, expected in (
        ("one--two", ["one", "two"]),
        ("", []),
        ("--", []),
        ("three--", ["three"]),
        ("f\u00f6ur", ["f\u00f6ur"]),
    ):
        path.write_text(text, encoding="utf-8")
        assert read(path, "--") == expected
        assert read(path) == [text] * bool(text)


@given(
    text=LETTERS.filter(bool),
    sizes=SIZES,
    longest=st.integers(1, 70),
)
def test_parts_cover_each_document_and_end_with_a_line(text, sizes, longest):
    (parts,) = parts_of(in_pieces(text, sizes), None, longest)
    assert "".join(parts) == text
    assert all(len(part) <= longest for part in parts)
    assert all(part.endswith("\n") or len(part) == longest for part in parts[:-1])
    assert parts_of([text], None, longest) == [parts], "the cuts do not depend on the pieces"


def ids_of(tokenizer, parts):
    """The ids of a document."""
    return [number for ids in tokenizer.encode_all(parts) for number in ids.tolist()]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 600)
    return load_tokenizer(folder)


SOME = ["the", "encoder", "JSON", "\u00e4", "\u4e2d\u6587", "\U0001f600", "\n\n", "  ", " ", ", "]
SOME += ["1234", "it's", "object", "_", "(self)", ".\n"]
WORDS = st.lists(st.sampled_from(SOME), max_size=40).map("".join)
LINES = st.lists(WORDS, max_size=8).map("\n".join)


@pytest.mark.text
@settings(max_examples=200)
@given(text=LINES, longest=st.integers(300, 600))
def test_ids_of_parts_are_those_of_the_documents(text, longest, tokenizer):
    """Each second half of `longest` characters has the end of a line here."""
    text = "\n".join(f"x{line[:100]}." for line in text.split("\n"))
    (parts,) = parts_of(in_pieces(text, [17, 40]), None, longest)
    assert ids_of(tokenizer, parts) == tokenizer.encode(text)


@pytest.mark.text
def test_a_document_of_the_longest_part_has_its_own_ids_with_any_tokenizer(tmp_path):
    """Llama 2's joins text across lines, so a cut gives other ids: this is seen."""
    save_like_llama(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), json.__doc__ * 3 + "\u00e4 \u4e2d\u6587" * 9
    for longest, same in ((len(text), True), (len(text) - 1, False)):
        (parts,) = parts_of([text], None, longest)
        assert (ids_of(tokenizer, parts) == tokenizer.encode(text)) is same


@pytest.mark.text
def test_one_word_longer_than_all_parts(tokenizer):
    """The broken twin: a cut inside a word gives other ids, but the same text."""
    text = "ab" * 20 + "the encoder of an object " * 40 + "\u00e4" * 777
    (parts,) = parts_of(in_pieces(text, [640]), None, 101)
    assert tokenizer.decode(ids_of(tokenizer, parts)) == text
    assert ids_of(tokenizer, parts) != tokenizer.encode(text)


def test_one_document_in_ten_is_held_out():
    count = sum(is_held_out(str(number)) for number in range(5000))
    assert abs(count - 500) < 6 * 21
    assert is_held_out("x" * documents_module.HEAD) == is_held_out(
        "x" * documents_module.HEAD + "y"
    )


# --- JSON lines, and files that are no text

MARK = b"\xef\xbb\xbf"
DOCUMENTS = ["one", "t\u00e4o\nlines", "\u2028 \U0001f600", "x" * 9000]
LINES_OF_JSON = "\n".join(json.dumps({"id": 1, "text": text}) for text in DOCUMENTS).encode()


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", LINES_OF_JSON), ("a.ndjson", LINES_OF_JSON + b"\n\n"),
    ("a.JSONL", LINES_OF_JSON.replace(b"\n", b"\r\n")), ("a.jsonl", MARK + LINES_OF_JSON),
    ("a.txt", LINES_OF_JSON), ("a.json", b'{"text": "one"}\n'),
    ("a.jsonl", b'{"text": ""}\n' + LINES_OF_JSON),
])  # fmt: skip
def test_documents_of_json_lines(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    assert read(path) == (DOCUMENTS if len(content) > 99 else ["one"])


@pytest.mark.parametrize(("line", "part"), [
    (b'{"txt": "a"}', "must be an object with a text named"), (b'{"text": 3}', "must be an object"),
    (b'["text"]', "must be an object"), (b"text", "is not JSON"), (b'{"text": "a', "is not JSON"),
    (b'{"text": "\\ud800"}', "half a character"), (b'{"text": "a", "text": "b"}', "twice"),
    (b"\xff", "is not UTF-8"), (b"\0" * 99, "is zero"), (b"[" * 100_000, "nested"),
])  # fmt: skip
def test_a_line_of_json_that_is_no_document(line, part, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES_OF_JSON + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"a.jsonl: line 5: .*{part}"):
        read(path)


def test_a_line_of_json_without_an_end_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MOST_LINE", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 2000)
    with pytest.raises(DataError, match=r"line 1: has 1,000 bytes or more"):
        read(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(MARK + b"text")
    assert read(path) == ["text"]
    path.write_bytes(MARK + b"te\xff")
    with pytest.raises(DataError, match="byte 5 cannot be decoded"):
        read(path)


NO_TEXTS = [
    (gzip.compress(b"text", mtime=0), "gzip"), (pickle.dumps({"text": 1}), "pickle"),
    (b"PAR1" + b"x" * 99, "Parquet"), (b"PK\3\4" + b"x" * 99, "zip archive"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    (b"<!DOCTYPE html>\n<html></html>", "a web page"), ("text".encode("utf-16"), "UTF-16"),
    ("text".encode("utf-16-be"), "byte 0 is zero"), (b"ab\0", "byte 2 is zero"),
    (b"GGUF" + b"x" * 99, "GGUF"), (b'[{"text": "a"},\n {"text": "b"}]', "a JSON array"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "part"), NO_TEXTS)
def test_a_file_that_is_no_text_is_named(content, part, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: is .*{part}"):
        read(path)


def test_a_web_page_that_says_so_is_text(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes(b"<!doctype html>")
    assert read(path) == ["<!doctype html>"]
