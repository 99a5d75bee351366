"""Documents in parts: separators across pieces, long documents, and what is held out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made import save_like_llama, save_tokenizer

from mpipar.data.documents import (
    HELD_OUT,
    End,
    Survey,
    cut_at,
    encoded_documents,
    head_hash,
    parts,
    read_documents,
    split,
    survey,
    whole,
)
from mpipar.data.tokenizer import byte_tokenizer, load_tokenizer
from mpipar.errors import DataError

LETTERS = st.text(alphabet="ab-\u00e4\u4e2d\U0001f600 \n", max_size=60)


def in_pieces(text, sizes):
    """The text in pieces of these lengths, over and over."""
    found, first = [], 0
    while first < len(text):
        size = sizes[len(found) % len(sizes)]
        found.append(text[first : first + size])
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
        "one--two",
        "--",
        "three--",
        "f\u00f6ur",
    ]
    paths[1].write_bytes(b"ab\0")
    with pytest.raises(DataError, match=r"1.txt: is not text: byte 2 is zero"):
        list(read_documents(paths, None, seen.append))


@given(text=LETTERS, sizes=SIZES, cut=st.integers(1, 70))
def test_a_document_is_cut_behind_so_many_characters(text, sizes, cut):
    found, part = [], ""
    for piece, end in cut_at(whole(in_pieces(text, sizes)), cut):
        part += piece
        if end is not End.NOTHING:
            found.append((part, end))
            part = ""
    expected = [(text[:cut], End.CUT), (text[cut:], End.DOCUMENT)]
    assert found == (expected if cut <= len(text) else [(text, End.DOCUMENT)])


@given(
    texts=st.lists(LETTERS.filter(bool), min_size=1, max_size=3),
    sizes=SIZES,
    longest=st.integers(1, 70),
)
def test_parts_cover_each_document_and_end_with_a_line(texts, sizes, longest):
    found, text = [], ""
    pieces = [one for text in texts for one in whole(in_pieces(text, sizes))]
    for part in parts(pieces, longest):
        assert len(part.text) <= longest
        text += part.text
        if part.end is End.DOCUMENT:
            found.append((text, part.head))
            text = ""
        elif not part.text.endswith("\n"):
            assert len(part.text) == longest
    assert [one for one, _ in found] == texts
    assert all(head == head_hash(one) for one, head in found if len(one) <= longest)


def ids_of(tokenizer, pieces, longest):
    """The ids of each document of a stream of pieces."""
    found, ids = [], []
    for some, part in encoded_documents(tokenizer, pieces, longest):
        ids += some.tolist()
        if part.end is End.DOCUMENT:
            found.append(ids)
            ids = []
    assert not ids
    return found


@given(texts=st.lists(LETTERS.filter(bool), max_size=3), sizes=SIZES, longest=st.integers(1, 20))
def test_bytes_of_parts_are_those_of_the_documents(texts, sizes, longest):
    pieces = [one for text in texts for one in whole(in_pieces(text, sizes))]
    assert ids_of(byte_tokenizer(True), pieces, longest) == [list(one.encode()) for one in texts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 600)
    return load_tokenizer(folder)


WORDS = st.lists(
    st.sampled_from(
        [
            "the",
            "encoder",
            "JSON",
            "\u00e4",
            "\u4e2d\u6587",
            "\U0001f600",
            "\n\n",
            "  ",
            " ",
            ", ",
            "1234",
            "it's",
            "object",
            "_",
            "(self)",
            ".\n",
        ]
    ),
    max_size=40,
).map("".join)
LINES = st.lists(WORDS, max_size=8).map("\n".join)


@pytest.mark.text
@settings(max_examples=200)
@given(texts=st.lists(LINES.filter(bool), min_size=1, max_size=3), longest=st.integers(300, 600))
def test_ids_of_parts_are_those_of_the_documents(texts, longest, tokenizer):
    """Each second half of `longest` characters has the end of a line here."""
    texts = ["\n".join(f"x{line[:100]}." for line in text.split("\n")) for text in texts]
    pieces = [one for text in texts for one in whole(in_pieces(text, [17, 40]))]
    assert ids_of(tokenizer, pieces, longest) == [tokenizer.encode(text) for text in texts]


@pytest.mark.text
def test_a_document_of_the_longest_part_has_its_own_ids_with_any_tokenizer(tmp_path):
    """Llama 2's joins text across lines, so a cut gives other ids: this is seen."""
    save_like_llama(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), json.__doc__ * 3 + "\u00e4 \u4e2d\u6587" * 9
    assert ids_of(tokenizer, whole([text]), len(text)) == [tokenizer.encode(text)]
    assert ids_of(tokenizer, whole([text]), len(text) - 1) != [tokenizer.encode(text)]


@pytest.mark.text
def test_one_word_longer_than_all_parts(tokenizer):
    """The broken twin: a cut inside a word gives other ids, but the same text."""
    text = "ab" * 20 + "the encoder of an object " * 40 + "\u00e4" * 777
    (ids,) = ids_of(tokenizer, whole(in_pieces(text, [640])), 101)
    assert tokenizer.decode(ids) == text
    assert ids != tokenizer.encode(text)


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
        set(texts)
    ), "equal documents are on one side"


def test_one_document_in_ten_is_held_out():
    found = Survey(5000, 1, 0, 2**64 - 1)
    count = sum(found.is_held_out(head_hash(str(number))) for number in range(5000))
    assert abs(count - 500) < 6 * 21


def test_no_text_at_all():
    with pytest.raises(DataError, match="there is no text"):
        survey([])
