"""Documents in pieces: separators across pieces, windows that overlap, and what is held out."""

import json
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_made import save_like_llama, save_of_words, save_tokenizer

from mpipar.data.documents import (
    HELD_OUT,
    End,
    Survey,
    cut_at,
    head_hash,
    read_documents,
    split,
    survey,
    whole,
    windows,
)
from mpipar.data.joined import encoded_documents
from mpipar.data.tokenizer import byte_tokenizer, load_tokenizer
from mpipar.errors import DataError

LETTERS = st.text(alphabet="ab-\u00e4\u4e2d\U0001f600 \n", max_size=60)


def in_pieces(text, sizes):
    """The text in pieces of these lengths, over and over."""
    found, first = [], 0
    while first < len(text):
        size = sizes[len(found) % len(sizes)]
        found.append(text[first:first + size])
        first += size
    return found


def documents(pieces):
    """The text of each document of a stream of pieces."""
    found, text = [], ""
    for piece, end in pieces:
        text += piece
        if end is End.DOCUMENT:
            found.append(text)
            text = ""
    assert text == ""
    return found


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(text=LETTERS, sizes=SIZES, separator=st.sampled_from(["-", "--", "-a-", "aa", "\u4e2d"]))
def test_a_separator_may_lie_across_pieces(text, sizes, separator):
    assert documents(split(in_pieces(text, sizes), separator)) == text.split(separator)


def test_documents_are_files_or_what_is_between_separators(tmp_path):
    paths, seen = [], []
    for number, text in enumerate(["one--two", "", "--", "three--", "f\u00f6ur"]):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text, encoding="utf-8")
    found = documents(read_documents(paths, "--", seen.append))
    assert found == ["one", "two", "three", "f\u00f6ur"]
    assert sum(seen) == sum(path.stat().st_size for path in paths)
    assert documents(read_documents(paths, None, seen.append)) == [
        "one--two", "--", "three--", "f\u00f6ur"]
    paths[1].write_bytes(b"ab\0")
    with pytest.raises(DataError, match=r"1.txt: is no text: byte 2 is zero"):
        list(read_documents(paths, None, seen.append))


@given(text=LETTERS, sizes=SIZES, cut=st.integers(1, 70))
def test_a_document_is_cut_behind_so_many_characters(text, sizes, cut):
    parts, part = [], ""
    for piece, end in cut_at(whole(in_pieces(text, sizes)), cut):
        part += piece
        if end is not End.NOTHING:
            parts.append((part, end))
            part = ""
    expected = [(text[:cut], End.CUT), (text[cut:], End.DOCUMENT)]
    assert parts == (expected if cut <= len(text) else [(text, End.DOCUMENT)])


@given(texts=st.lists(LETTERS.filter(bool), min_size=1, max_size=3), sizes=SIZES,
       size=st.integers(1, 20), overlap=st.integers(0, 9))
def test_windows_overlap_and_cover_each_document(texts, sizes, size, overlap):
    found, text = [], ""
    pieces = [one for text in texts for one in whole(in_pieces(text, sizes))]
    for window in windows(pieces, size, overlap):
        assert len(window.text) <= size + overlap
        if window.first:
            text = window.text
        else:
            assert text.endswith(window.text[:overlap])
            text += window.text[overlap:]
        assert window.end is End.DOCUMENT or len(window.text) == size + overlap
        if window.end is End.DOCUMENT:
            found.append(text)
    assert found == texts


def ids_of(tokenizer, pieces, size, overlap):
    """The ids of each document of a stream of pieces."""
    found, ids = [], []
    for some, end, _ in encoded_documents(tokenizer, pieces, size, overlap):
        ids += some.tolist()
        if end is End.DOCUMENT:
            found.append(ids)
            ids = []
    assert not ids
    return found


@given(texts=st.lists(LETTERS.filter(bool), max_size=3), sizes=SIZES, size=st.integers(1, 20))
def test_bytes_of_windows_are_those_of_the_documents(texts, sizes, size):
    pieces = [one for text in texts for one in whole(in_pieces(text, sizes))]
    assert ids_of(byte_tokenizer(True), pieces, size, 9) == [list(one.encode()) for one in texts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 600)
    return load_tokenizer(folder)


WORDS = st.lists(st.sampled_from(
    ["the", "encoder", "JSON", "\u00e4", "\u4e2d\u6587", "\U0001f600", "\n\n", "  ", " ", ", ",
     "1234", "it's", "object", "_", "(self)"]), max_size=200).map("".join)


@pytest.mark.text
@settings(max_examples=200)
@given(texts=st.lists(WORDS.filter(bool), min_size=1, max_size=3), size=st.integers(50, 200))
def test_ids_of_windows_are_those_of_the_documents(texts, size, tokenizer):
    pieces = [one for text in texts for one in whole(in_pieces(text, [17, 40]))]
    assert ids_of(tokenizer, pieces, size, 200) == [tokenizer.encode(text) for text in texts]


@pytest.mark.text
@settings(max_examples=100)
@given(text=st.text(min_size=1, alphabet="ab \u00e4\U0001f600\n", max_size=300),
       size=st.integers(1, 30), overlap=st.integers(1, 30))
@example(text="a    a", size=1, overlap=3)
def test_windows_without_a_common_id_still_give_back_the_text(text, size, overlap, tokenizer):
    ids, = ids_of(tokenizer, whole([text]), size, overlap)
    assert tokenizer.decode(ids) == text


@pytest.mark.text
def test_windows_of_a_tokenizer_that_does_not_cut_words_apart(tmp_path):
    save_like_llama(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), json.__doc__ * 3 + "\u00e4 \u4e2d\u6587" * 9
    for size, overlap in ((900, 200), (512, 300)):
        ids, = ids_of(tokenizer, whole([text]), size, overlap)
        assert ids == tokenizer.encode(text)


@pytest.mark.text
def test_one_word_longer_than_all_windows(tokenizer):
    """Equal letters pair from where a window begins, so that windows may not agree on any id."""
    text = "ab" * 20 + "x" * 5000 + "\u00e4" * 777
    for size, overlap in ((1000, 100), (997, 3), (1000, 1)):
        ids, = ids_of(tokenizer, whole(in_pieces(text, [640])), size, overlap)
        assert tokenizer.decode(ids) == text


@pytest.mark.text
@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel"])
def test_an_unknown_word_longer_than_all_windows_has_one_id(kind, tmp_path):
    tokenizer = save_of_words(tmp_path, kind)
    for before, letters, behind in product(
            ("", "the ", "the a " * 900), (150, 270, 999, 1200, 5000), ("", " a", " b" * 500)):
        text = before + "a" * letters + behind
        for size, overlap in ((500, 200), (1000, 201)):
            assert ids_of(tokenizer, whole(in_pieces(text, [640])), size, overlap) == [
                tokenizer.encode(text)], (len(before), letters, len(behind), size)


@pytest.mark.text
def test_windows_without_common_text_are_caught(tokenizer):
    """The broken twin: where a window ends in a word, its ids are not those of the document."""
    text = "the encoder of an object " * 40
    assert ids_of(tokenizer, whole([text]), 101, 60) == [tokenizer.encode(text)]
    assert ids_of(tokenizer, whole([text]), 101, 0) != [tokenizer.encode(text)]


# --- what is held out


@settings(max_examples=50)
@given(texts=st.lists(LETTERS.filter(bool), min_size=1, max_size=30))
def test_of_several_documents_some_are_held_out_but_not_all(texts):
    pieces = [one for text in texts for one in whole([text])]
    if len(texts) > 1 and len(set(texts)) == 1:
        with pytest.raises(DataError, match="are the same text"):
            survey(pieces)
        return
    if len(texts) == 1 and len(texts[0]) < HELD_OUT:
        with pytest.raises(DataError, match="too little text"):
            survey(pieces)
        return
    found = survey(pieces)
    assert (found.documents, found.characters) == (len(texts), sum(map(len, texts)))
    if len(texts) == 1:
        assert found.cut == len(texts[0]) - len(texts[0]) // HELD_OUT
        return
    held_out = [found.is_held_out(head_hash(text)) for text in texts]
    assert any(held_out)
    assert not all(held_out)
    assert len({(text, held) for text, held in zip(texts, held_out, strict=True)}) == len(
        set(texts)), "equal documents are on one side"


def test_one_document_in_ten_is_held_out():
    found = Survey(5000, 1, 0, 2**64 - 1)
    count = sum(found.is_held_out(head_hash(str(number))) for number in range(5000))
    assert abs(count - 500) < 6 * 21


def test_no_text_at_all():
    with pytest.raises(DataError, match="there is no text"):
        survey([])
