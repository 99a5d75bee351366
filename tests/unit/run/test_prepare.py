"""`mpipar data prepare`: documents of text files to a folder of tokens, and back."""

import errno
import gzip
import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import StandIn, alone, assert_refused, printed
from one_rank import fresh
from program import PROGRAM, environment, flip
from tokenizers_made import save_tokenizer

from mpipar import cli
from mpipar.config.text import harmless
from mpipar.errors import DataError, OutputError
from mpipar.run.checkpoint.weights import save
from mpipar.run.data import documents as documents_module
from mpipar.run.data import prepared as prepared_module
from mpipar.run.data.documents import BLOCK, is_held_out, read_documents, text_pieces
from mpipar.run.data.parts import load
from mpipar.run.data.prepared import read_dataset
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import fingerprint, pieces_of
from mpipar.run.data.tokenizer import END, FILES, load_tokenizer

# --- documents and their parts

LETTERS = st.text(alphabet="ab-\u00e4\u4e2d\U0001f600 \n", max_size=60)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def in_pieces(text, sizes):
    """The text in pieces of these lengths, over and over."""
    rest, sizes = iter(text), itertools.cycle(sizes)
    return list(iter(lambda: "".join(itertools.islice(rest, next(sizes))), ""))


def parts_of(pieces, separator=None, longest=1 << 20):
    """The parts of each document of a text that comes in pieces; longest: characters of a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "LONGEST", longest)
        found = list(documents_module._split(pieces, separator, Counter()))
    stops = [number for number, (_, ends) in enumerate(found, 1) if ends]
    return [
        [text for text, _ in found[first:stop]] for first, stop in itertools.pairwise([0, *stops])
    ]


@given(
    text=LETTERS,
    sizes=SIZES,
    separator=st.sampled_from(["-", "--", "-a-", "aa", "\u4e2d"]),
    longest=st.integers(2, 70),
)
def test_a_separator_may_lie_across_pieces_and_parts(text, sizes, separator, longest):
    found = parts_of(in_pieces(text, sizes), separator, longest)
    assert ["".join(one) for one in found] == text.split(separator)


@given(text=LETTERS, sizes=SIZES, longest=st.integers(1, 70))
def test_parts_cover_each_document_and_end_with_a_line(text, sizes, longest):
    (parts,) = parts_of(in_pieces(text, sizes), None, longest)
    assert "".join(parts) == text
    assert all(part.endswith("\n") or len(part) == longest for part in parts[:-1])
    assert all(len(part) <= longest for part in parts[:-1])
    assert len(parts[-1]) <= 2 * longest
    assert parts_of([text], None, longest) == [parts], "the cuts do not depend on the pieces"


@given(st.lists(st.text(alphabet="a\u00e4\u4e2d\U0001f600\n")), st.integers(1, 9))
def test_text_is_read_in_blocks_of_any_size(texts, size):
    content = "".join(texts).encode()
    blocks = [content[first : first + size] for first in range(0, len(content), size)]
    assert "".join(text_pieces(blocks)) == "".join(texts)


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
LINES = st.lists(WORDS, min_size=4, max_size=12).map("\n".join)


@pytest.mark.text
@settings(max_examples=200)
@given(text=LINES, longest=st.integers(150, 300))
def test_ids_of_parts_are_those_of_the_documents(text, longest, tokenizer):
    """Each second half of `longest` characters has the end of a line that is not indented."""
    text = "".join(f"x{line[:45]}.\n    x.\n" for line in text.split("\n"))
    (parts,) = parts_of(in_pieces(text, [17, 40]), None, longest)
    assert ids_of(tokenizer, parts) == tokenizer.encode(text)


@pytest.mark.text
def test_ids_differ_where_a_cut_halves_a_word(tokenizer):
    """The broken twin: the text is the same."""
    text = "ab" * 20 + "the encoder of an object " * 40 + "\u00e4" * 777
    (parts,) = parts_of(in_pieces(text, [640]), None, 101)
    assert tokenizer.decode(ids_of(tokenizer, parts)) == text
    assert ids_of(tokenizer, parts) != tokenizer.encode(text)


def test_one_document_in_ten_is_held_out():
    count = sum(is_held_out(str(number)) for number in range(5000))
    assert abs(count - 500) < 6 * 21
    beginning = "x" * documents_module.HEAD
    assert is_held_out(beginning) == is_held_out(beginning + "y")


MARK = b"\xef\xbb\xbf"
DOCUMENTS = ["one", "t\u00e4o\nlines", "\u2028 \U0001f600", "x" * 9000]
LINES_OF_JSON = "\n".join(json.dumps({"id": 1, "text": text}) for text in DOCUMENTS).encode()


@pytest.mark.parametrize(("name", "content", "documents"), [
    ("a.jsonl", LINES_OF_JSON, DOCUMENTS), ("a.ndjson", LINES_OF_JSON + b"\n\n", DOCUMENTS),
    ("a.JSONL", LINES_OF_JSON.replace(b"\n", b"\r\n"), DOCUMENTS),
    ("a.jsonl", MARK + LINES_OF_JSON, DOCUMENTS), ("a.txt", LINES_OF_JSON, DOCUMENTS),
    ("a.txt", MARK + LINES_OF_JSON, DOCUMENTS), ("a.json", b'{"text": "one"}', ["one"]),
    ("a.jsonl", b'{"text": ""}\n' + LINES_OF_JSON, DOCUMENTS),
    ("a.txt", b"one--two", ["one", "two"]), ("a.txt", b"", []), ("a.txt", b"--", []),
    ("a.txt", b"three--", ["three"]), ("a.txt", MARK + b"text", ["text"]),
    ("a.html", b"<!doctype html>", ["<!doctype html>"]),
])  # fmt: skip
def test_documents_are_lines_of_json_or_what_is_between_separators(
    name, content, documents, tmp_path
):
    seen = []
    (tmp_path / name).write_bytes(content)
    found = list(read_documents(tmp_path / name, "--", Counter(), seen.append))
    assert found == [(text, True) for text in documents]
    assert sum(seen) == len(content)


@pytest.mark.parametrize(("line", "part"), [
    (b'{"txt": "a"}', "must be an object with a text named"), (b'{"text": 3}', "must be an object"),
    (b'["text"]', "must be an object"), (b"text", "is not JSON"), (b'{"text": "a', "is not JSON"),
    (b'{"text": "\\ud800"}', "may not have the value"), (b'{"text": "a", "text": "b"}', "twice"),
    (b"\xff", "is not UTF-8"), (b"\0" * 99, "is zero"), (b"[" * 100_000, "nested"),
    (b'{"text": "' + b"x" * 20_000 + b'"}', "is not JSON"),
])  # fmt: skip
def test_a_line_of_json_that_is_no_document(line, part, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MOST_LINE", 10_000 if b"x" in line[:11] else 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES_OF_JSON + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"a.jsonl: line 5: .*{part}"):
        list(read_documents(path, None, Counter()))


@pytest.mark.parametrize(("content", "part"), [
    (gzip.compress(b"text", mtime=0), "gzip"), (pickle.dumps({"text": 1}), "pickle"),
    (b"PAR1" + b"x" * 99, "Parquet"), (b"PK\3\4" + b"x" * 99, "zip archive"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    (b"<!DOCTYPE html>\n<html></html>", "a web page"), ("text".encode("utf-16"), "UTF-16"),
    ("text".encode("utf-16-be"), "byte 0 is zero"), (b"ab\0", "byte 2 is zero"),
    (b"GGUF" + b"x" * 99, "GGUF"), (b'[{"text": "a"},\n {"text": "b"}]', "a JSON array"),
    (MARK + b'[{"text": "a"}]', "a JSON array"), (b"caf\xe9", "byte 3 cannot be decoded"),
    (MARK + b"te\xff", "byte 5 cannot be decoded"), (b"x" * BLOCK + b"yz\0", f"{BLOCK + 2:,} is"),
    (b"x" * (BLOCK - 1) + "\u00e4".encode() + b"\x80", f"byte {BLOCK + 1:,} cannot be decoded"),
    (b"x" * (BLOCK - 1) + "\U0001f600".encode()[:3], f"byte {BLOCK - 1:,} cannot be decoded"),
])  # fmt: skip
def test_a_file_that_is_no_text_is_named(content, part, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: is .*{part}"):
        list(read_documents(path, None, Counter()))


def test_a_page_is_text_by_its_name_but_no_array(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes(b"<!DOCTYPE html>")
    assert [text for text, _ in read_documents(path, None, Counter())] == ["<!DOCTYPE html>"]
    path.write_bytes(b'[{"text": "a"}]')
    with pytest.raises(DataError, match="a JSON array"):
        list(read_documents(path, None, Counter()))


# --- what is written

STORIES = [
    f"Story {number}: the encoder of object {number * 7} is \u00e4 \u4e2d.\n" * 3
    for number in range(40)
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with some documents in stories.txt."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories.txt").write_text("<sep>".join(STORIES), encoding="utf-8")
    return tmp_path


def prepared(tokenizer="bytes", *words, texts="stories.txt", separator="<sep>", out="out"):
    """What `data prepare` prints, and what dataset.json says then."""
    more = ("--separator", separator) if separator else ()
    text = printed("data", "prepare", texts, "--tokenizer", tokenizer, *more, "--out", out)
    return text, json.loads((Path(out) / "dataset.json").read_text())


def documents_of(out="out"):
    """The ids of each document of both parts, in order, without the id that ends it."""
    found, parts = read_dataset(Path(out))[0], []
    for file in found.files:
        ids = np.fromfile(Path(out, file.name), f"<{np.dtype(found.dtype).str[1:]}")
        ends = np.flatnonzero(ids == found.end_of_text)
        assert ends[-1] == len(ids) - 1
        assert (len(ends), len(ids)) == (file.documents, file.tokens)
        assert hashlib.sha256(Path(out, file.name).read_bytes()).hexdigest() == file.sha256
        bounds = zip([0, *ends[:-1] + 1], ends, strict=True)
        parts.append([ids[first:last].tolist() for first, last in bounds])
    return parts


def texts_of(out="out"):
    """The text of each document of both parts that were prepared as bytes."""
    return [[bytes(ids).decode() for ids in part] for part in documents_of(out)]


def test_bytes_of_documents_between_separators(here):
    text, found = prepared()
    assert (found["dtype"], found["vocab_size"], found["end_of_text"]) == ("uint16", 257, 256)
    train, held_out = texts_of()
    assert sorted(train + held_out) == sorted(STORIES)
    assert [one for one in STORIES if one in train] == train
    assert 0 < len(held_out) < 20
    assert text.endswith("train on it: mpipar train --data out\n")
    names = ["dataset.json", "tokenizer.json", "tokenizer_config.json", "train.bin", "val.bin"]
    assert sorted(path.name for path in Path("out").iterdir()) == names
    assert not list(here.glob("*.partial*"))


def loaded(folder):
    """The two parts of a prepared folder, as a run has them."""
    model = SimpleNamespace(vocab_size=257, seq_len=2)
    return load(SimpleNamespace(run=SimpleNamespace(data=(folder,), val_data=()), model=model))[0]


def test_a_document_is_a_file_or_a_line_of_json(here):
    """Of a single one, a run holds out the last tenth."""
    lines = "".join(json.dumps({"text": story}) + "\n" for story in STORIES[:20])
    for number, story in enumerate([lines, *STORIES[20:]]):
        path = here / "in" / str(number % 3) / f"{number}.{'txt' if number else 'jsonl'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(story, encoding="utf-8")
    (here / "in" / ".hidden").write_bytes(b"\0")
    prepared(texts="in", separator=None)
    train, held_out = texts_of()
    assert sorted(train + held_out) == sorted(STORIES)
    prepared(separator=None, out="one")
    tokens, whole = (
        np.fromfile("one/train.bin", "<u2").tolist(),
        (here / "stories.txt").read_bytes(),
    )
    assert tokens == [*whole, 256]
    assert not Path("one/val.bin").read_bytes()
    train, held_out = map(np.asarray, loaded("one"))
    assert [*train, *held_out] == tokens
    assert len(held_out) == len(tokens) // 10


@pytest.mark.text
def test_a_new_tokenizer_is_the_same_in_every_run(here):
    _, found = prepared("train:300")
    assert (found["vocab_size"], found["end_of_text"]) == (300, 0)
    assert prepared("train:300", out="again")[1] == found
    tokenizer, (train, held_out) = load_tokenizer("out"), documents_of()
    assert sorted(map(tokenizer.decode, train + held_out)) == sorted(STORIES)
    transformers = pytest.importorskip("transformers", reason="text: transformers is missing")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs.eos_token == END
    assert theirs(STORIES[0])["input_ids"] == tokenizer.encode(STORIES[0])


@pytest.mark.text
def test_many_ids_are_uint32(here, monkeypatch):
    monkeypatch.setattr(prepared_module, "WIDE", 300)
    save_tokenizer(here / "model")
    assert prepared("model")[1]["dtype"] == "uint32"
    assert load_source(("out",), 400).tokens.dtype == np.uint32


@pytest.mark.parametrize(("text", "separator", "parts"), [
    (f"a story{END}" * 60, "===", [f"contains {END} 60 times", f"'{END}'", "'===' does not occur"]),
    (f"a story{END}" * 60, END, []), ("a story\n\n" * 9, "\n\n", []),
    ("a story\r\n\r\n" * 9, "\n\n", ["'\\n\\n' does not occur in", "CRLF"]),
    ("a story\r\n\r\n" * 9, "\r\n\r\n", []),
])  # fmt: skip
def test_separators_that_are_not_given_or_do_not_occur(text, separator, parts, here, capsys):
    (here / "a.txt").write_bytes(text.encode())
    words = ["data", "prepare", "a.txt", "--tokenizer", "bytes", "--out", "out"]
    cli.main([*words, "--separator", separator], StandIn())
    said = capsys.readouterr().err
    assert all(part in said for part in parts)
    assert bool(said) == bool(parts)


@pytest.mark.parametrize(
    "texts", [["same"] * 20, ["one of them", "same"] * 9, STORIES[:2], ["x" * 30]]
)
def test_the_first_document_is_trained_on_and_its_equals(texts, here):
    """Nothing is held out by chance, or all: then a run holds out the last tenth of the tokens."""
    (here / "a.txt").write_text("<sep>".join(texts), encoding="utf-8")
    _, found = prepared(texts="a.txt")
    train, held_out = loaded("out")
    assert len(train)
    assert len(held_out)
    assert len(train) + len(held_out) == len("".join(texts).encode()) + len(texts)
    assert sum(file["documents"] for file in found["files"]) == len(texts)


def test_what_a_killed_preparation_left_is_removed(here):
    for number in (2**22 + 1, 1):  # the first is above the largest process number
        (here / f"out.partial-{number}").mkdir()
        (here / f"out.partial-{number}" / "train.bin").write_bytes(b"ab")
    prepared()
    assert [path.name for path in here.glob("out.partial-*")] == ["out.partial-1"]


# --- refusals


@pytest.mark.parametrize(("words", "parts"), [
    ("", ["data : type mpipar data prepare TEXT", "--tokenizer : is not there", "--out : must be"]),
    ("prepare stories.txt --tokenizer train:257 --out stories.txt",
     ["train:257: is not there", "258 to 1,048,576", "--out stories.txt: must be a new folder"]),
    ("prepare stories.txt --tokenizer train:1e4 --out out --seprator x",
     ["train:1e4: is not there", "did you mean --separator"]),
    ("prepare stories.txt nowhere --tokenizer byte --out out --separator=",
     ["nowhere: no such file", "byte: is not there", "--separator '': must not be empty"]),
    ("list stories.txt --tokenizer bytes --out out", ["data list: type mpipar data prepare"]),
])  # fmt: skip
def test_all_mistakes_of_the_arguments_at_once(words, parts, here):
    assert_refused(2, parts, "data", *words.split())


OF_BYTES = ("--tokenizer", "bytes", "--out", "out")


@pytest.mark.parametrize(("name", "content", "part"), [
    ("zero.txt", b"text\0", "zero.txt: is not text: byte 4 is zero"),
    ("empty.txt", b"", "these files have no text"), ("missing.txt", None, "no such file"),
])  # fmt: skip
def test_files_without_text(name, content, part, here):
    if content is not None:
        (here / name).write_bytes(content)
    assert_refused(65, [part], "data", "prepare", name, *OF_BYTES)
    assert not list(here.glob("out*"))


@pytest.mark.text
def test_a_tokenizer_without_an_end_of_text(here):
    save_tokenizer(here / "model")
    path = here / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace(END, "<unk>"))
    words = "data prepare stories.txt --tokenizer model --out out".split()
    assert_refused(65, ["no file says which id ends a text", "eos_token"], *words)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = here / "model" / name
        path.write_text('{"eos_token": "<unk>"}')
        assert prepared("model", out=name)[1]["end_of_text"] == 0
        path.unlink()


def test_a_full_disk_leaves_nothing(here, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"out: can't be written: No space left") as caught:
        cli.main(["data", "prepare", "stories.txt", *OF_BYTES], StandIn())
    assert caught.value.exit_code == 74
    assert not list(here.glob("out*"))


@pytest.mark.slow
def test_a_signal_leaves_nothing(tmp_path):
    """Also a program that ends at once takes its half-written folder with it."""
    (tmp_path / "text.txt").write_bytes(b"some text to read\n" * (4096 * 4000))
    process = subprocess.Popen(
        [*PROGRAM, "data", "prepare", "text.txt", *OF_BYTES],
        cwd=tmp_path, stderr=subprocess.DEVNULL, env={**os.environ, **environment()},
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("out.partial-*/train.bin")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert not list(tmp_path.glob("out*"))


# --- reading it back


@pytest.fixture
def folder(here):
    prepared()
    return here / "out"


def problems(folder, vocab_size=257, thorough=True):
    with pytest.raises(DataError) as caught:
        load_source((str(folder),), vocab_size, thorough)
    return "\n".join(caught.value.problems)


def test_files_that_are_not_what_was_written(folder):
    path = folder / "val.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    assert "val.bin: has " in problems(folder)
    path.write_bytes(content[:10] + b"\x7f\x7f" + content[12:])
    assert "has other tokens than were written: SHA-256" in problems(folder)
    load_source((str(folder),), 257, thorough=False)  # another process of the host looks at it
    path.unlink()
    os.mkfifo(path)
    assert "is a link, a folder, a pipe or a device" in problems(folder)


def test_another_tokenizer_and_a_small_model(folder):
    assert "is outside the vocabulary of 256; type --vocab-size 257" in problems(folder, 256)
    (folder / "tokenizer.json").write_text("{}")
    assert "the tokenizer is not the one that made the tokens" in problems(folder)
    (folder / "tokenizer.json").unlink()
    assert "the tokenizer is not the one" in problems(folder)
    with pytest.raises(DataError, match="a prepared folder is given alone"):
        load_source(("other", str(folder)), 257)


@pytest.mark.parametrize(("change", "part"), [
    ({"format": 2}, "prepare the data again"), ({"dtype": "int64"}, "prepare the data again"),
    ({"vocab_size": 2**40}, "prepare the data again"), ({"files": []}, "prepare the data again"),
    ({"more": 1}, "unknown key 'more'"), ({"tokenizer": "a\nb"}, "not a legal str"),
    ({"name": "../out/train.bin"}, "prepare the data again"), ({"tokens": -1}, "train.bin: has"),
    ({"tokens": 2**60}, "train.bin: has"), ({"sha256": ""}, "other tokens than were written"),
])  # fmt: skip
def test_a_description_that_cannot_be(change, part, folder):
    content = json.loads((folder / "dataset.json").read_text())
    (content["files"][0] if change.keys() <= content["files"][0].keys() else content).update(change)
    (folder / "dataset.json").write_text(json.dumps(content))
    assert part in problems(folder)


# --- runs on a prepared folder: the vocabulary, the held-out part, resuming, and text

SMALL = """--layers 1 --d-model 8 --heads 2 --ffn 8 --seq-len 16 --batch-size 4
    --num-microbatches 1""".split()


@pytest.mark.parametrize(
    ("words", "size"), [((), 257), (("--vocab-size", 300), 300), (("--config", "a.toml"), 400)]
)
def test_the_model_has_the_vocabulary_of_its_data(words, size, folder):
    Path("a.toml").write_text("vocab-size = 400\n")
    text = printed("train", "--print-config", "--data", "out", *words)
    assert f"\nvocab-size = {size}\n" in text
    assert ("# --vocab-size 257, the vocabulary of the data" in text) == (size == 257)


def test_the_fingerprint_covers_the_description(folder):
    """Such as another tokenizer of the same tokens; that of tokens is in test_compared."""

    def found(name):
        source = load_source((name,), 257)
        arrays = [source.tokens, source.held_out]
        return fingerprint(arrays, {piece.file.name: "same" for piece in pieces_of(arrays)})

    shutil.copytree("out", "copy")
    assert found("copy") == found("out")
    path = Path("copy", "dataset.json")
    path.write_text(path.read_text() + " ")
    assert found("copy")["files"] != found("out")["files"]


@pytest.mark.text
def test_train_go_on_and_generate_with_the_tokenizer_of_the_data(here):
    """The run keeps the tokenizer from its first step on; another data folder is refused."""
    save_tokenizer(here / "model")
    prepared("model")
    words = ["--data", "out", "--out", "run", "--steps", "2", *SMALL, "--sample-tokens", "5"]
    result = alone("train", *words, cwd=here).ended()
    assert "V 400, tied head" in result.stdout
    source = load_source(("out",), 400)
    assert f"{len(source.tokens):,} to train on, {len(source.held_out):,} held out" in result.stdout
    said = result.stdout.split("text generated from 'The ':\n")[1].split("\n\n")[0]
    said = "\n".join(line.removeprefix("| ") for line in said.splitlines())
    kept = load_tokenizer("run/weights")
    assert kept.files == load_tokenizer("model").files
    beside = json.loads(Path("run/weights/generation_config.json").read_text())
    assert beside["eos_token_id"] == kept.end == 0
    assert {path.name for path in Path("run/weights").iterdir()} & {*FILES} == {"tokenizer.json"}
    again = alone("generate", "run", "--sample-tokens", 5, cwd=here)
    assert harmless(again.stdout).rstrip() == said.rstrip()
    shutil.copytree("out", "other")
    flip(Path("other", "train.bin"), 0)
    words = ("train", "--resume", "auto", "--out", "run", "--steps", 3, "--data", "other")
    assert_refused(65, ["has other tokens than were written"], *words)
    description = json.loads(Path("other", "dataset.json").read_text())
    digest = hashlib.sha256(Path("other", "train.bin").read_bytes()).hexdigest()
    description["files"][0]["sha256"] = digest
    Path("other", "dataset.json").write_text(json.dumps(description))
    assert_refused(65, ["--data: has changed since the checkpoint"], *words)


def test_a_large_vocabulary_has_no_table_of_pairs(folder):
    """The square of 50,257 numbers would take 20 GB."""
    words = "--vocab-size 600 --steps 1 --sample-tokens 0 --eval-tokens 64".split()
    done = alone("train", "--data", "out", *SMALL, *words, cwd=folder.parent).ended()
    assert "byte-bigram" not in done.stdout


@pytest.mark.text
def test_held_out_data_of_another_tokenizer_is_refused(folder):
    prepared("train:300", out="other")
    parts = ["--val-data: its tokens were made by another", "--tokenizer other"]
    assert_refused(65, parts, "train", "--data", "other", "--val-data", "out")


def test_weights_keep_their_vocabulary(folder):
    save(fresh(layers=1, d_model=8, heads=2, ffn=8, seq_len=16, vocab_size=256), Path("weights"))
    words = ("train", "--data", "out", "--init-from", "weights")
    assert_refused(65, ["outside the vocabulary of 256"], *words)
