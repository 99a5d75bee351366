"""`mpipar data prepare`: text files to a folder of tokens, whole or not at all, and back."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from in_process import StandIn, alone, assert_refused, printed
from one_rank import fresh
from program import PROGRAM, environment
from tokenizers_made import save_tokenizer

from mpipar import cli
from mpipar.config.text import harmless
from mpipar.errors import DataError, OutputError
from mpipar.run.checkpoint.weights import save
from mpipar.run.data import prepare as prepare_module
from mpipar.run.data.dataset import read_dataset
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import fingerprint, pieces_of
from mpipar.run.data.tokenizer import END, FILES, load_tokenizer

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


def prepared(*words, out="out"):
    """What `data prepare` prints, and what dataset.json says then."""
    text = printed("data", "prepare", *words, "--out", out)
    return text, json.loads((Path(out) / "dataset.json").read_text())


def documents_of(folder, part):
    """The ids of each document of a part, in order, without the id that ends it."""
    found, _ = read_dataset(folder)
    ids = np.concatenate(
        [
            np.fromfile(folder / file.name, f"<{np.dtype(found.dtype).str[1:]}")
            for file in found.part(part)
        ]
    )
    ends = np.flatnonzero(ids == found.end_of_text)
    assert ends[-1] == len(ids) - 1
    assert len(ends) == sum(file.documents for file in found.part(part))
    return [ids[first:last].tolist() for first, last in zip([0, *ends[:-1] + 1], ends, strict=True)]


def test_bytes_of_documents_between_separators(here):
    text, found = prepared("stories.txt", "--separator", "<sep>", "--tokenizer", "bytes")
    assert (found["dtype"], found["vocab_size"], found["end_of_text"]) == ("uint16", 257, 256)
    parts = {part: documents_of(here / "out", part) for part in ("train", "val")}
    texts = {part: [bytes(ids).decode() for ids in parts[part]] for part in parts}
    assert sorted(texts["train"] + texts["val"]) == sorted(STORIES)
    assert [one for one in STORIES if one in texts["train"]] == texts["train"]
    assert 0 < len(texts["val"]) < 20
    assert "bytes: 257 ids in uint16, 256 ends a text; " in text
    assert text.endswith("train on it: mpipar train --data out\n")
    for file in found["files"]:
        content = (here / "out" / file["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        assert len(content) == 2 * file["tokens"]
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        "dataset.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.bin",
        "val.bin",
    ]
    assert not list(here.glob("*.partial*"))


def test_the_last_tenth_of_one_document(here):
    whole = (here / "stories.txt").read_text(encoding="utf-8")
    prepared("stories.txt", "--tokenizer", "bytes")
    train, held_out = (np.fromfile(f"out/{part}.bin", "<u2") for part in ("train", "val"))
    assert bytes([*train.tolist(), *held_out[:-1].tolist()]).decode() == whole
    assert held_out[-1] == 256
    assert len(held_out) == (len(whole.encode()) + 1) // 10


def test_a_file_is_a_document_without_a_separator(here):
    for number, story in enumerate(STORIES):
        (here / "in" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (here / "in" / f"{number % 3}" / f"{number}.txt").write_text(story, encoding="utf-8")
    (here / "in" / ".hidden").write_bytes(b"\0")
    prepared("in", "--tokenizer", "bytes")
    found = documents_of(here / "out", "train") + documents_of(here / "out", "val")
    assert sorted(bytes(ids).decode() for ids in found) == sorted(STORIES)


@pytest.mark.text
def test_a_new_tokenizer_is_the_same_in_every_run(here):
    text, found = prepared("stories.txt", "--separator", "<sep>", "--tokenizer", "train:300")
    assert (found["vocab_size"], found["end_of_text"]) == (300, 0)
    assert "tokenizer: 300 ids in uint16, 0 ends a text" in text
    _, again = prepared(
        "stories.txt", "--separator", "<sep>", "--tokenizer", "train:300", out="again"
    )
    assert again == found
    tokenizer = load_tokenizer("out")
    assert sorted(
        tokenizer.decode(ids)
        for part in ("train", "val")
        for ids in documents_of(here / "out", part)
    ) == sorted(STORIES)
    transformers = pytest.importorskip("transformers", reason="text: transformers is missing")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    assert theirs.eos_token == END
    assert theirs(STORIES[0])["input_ids"] == tokenizer.encode(STORIES[0])


@pytest.mark.text
def test_many_ids_are_uint32(here, monkeypatch):
    monkeypatch.setattr(prepare_module, "WIDE", 300)
    save_tokenizer(here / "model")
    _, found = prepared("stories.txt", "--tokenizer", "model")
    assert found["dtype"] == "uint32"
    assert load_source(("out",), 400).tokens.dtype == np.uint32


def test_folders_of_earlier_versions_with_several_files_are_read(here):
    _, found = prepared("stories.txt", "--separator", "<sep>", "--tokenizer", "bytes")
    before = load_source(("out",), 257)
    files = []
    for file in found["files"]:
        content, part = (here / "out" / file["name"]).read_bytes(), file["name"][:-4]
        for number, piece in enumerate((content[:200], content[200:])):
            name = f"{part}-{number:05d}.bin"
            (here / "out" / name).write_bytes(piece)
            digest = hashlib.sha256(piece).hexdigest()
            documents = file["documents"] * number
            files.append(file | {"name": name, "tokens": len(piece) // 2, "sha256": digest})
            files[-1]["documents"] = documents
        (here / "out" / file["name"]).unlink()
    (here / "out" / "dataset.json").write_text(json.dumps(found | {"files": files}))
    after = load_source(("out",), 257)
    assert after.what == before.what
    np.testing.assert_array_equal(after.tokens, before.tokens)
    np.testing.assert_array_equal(after.held_out, before.held_out)


@pytest.mark.slow
def test_a_large_file_is_read_in_pieces(here):
    """One document of 48 MB: what is held in memory is a small part of it."""
    size = 48 << 20
    line = b"a line of text with nothing new in it\n"
    with open("large.txt", "wb") as file:
        file.writelines(line * (1 << 10) for _ in range(size // len(line) >> 10))
    tracemalloc.start()
    prepared("large.txt", "--tokenizer", "bytes")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 2, peak


def test_json_lines_are_documents(here):
    lines = "".join(json.dumps({"text": story}) + "\n" for story in STORIES)
    (here / "stories.jsonl").write_text(lines)
    text, _ = prepared("stories.jsonl", "--tokenizer", "bytes")
    parts = {part: documents_of(here / "out", part) for part in ("train", "val")}
    texts = [bytes(ids).decode() for ids in parts["train"] + parts["val"]]
    assert sorted(texts) == sorted(STORIES)
    assert parts["val"]
    assert "0.99 bytes of text per token" in text


@pytest.mark.parametrize(("text", "words", "parts"), [
    (f"a story{END}" * 60, [], [f"contains {END} 60 times", f"--separator '{END}'"]),
    ("a story</s>" * 9, ["--separator", "<sep>"], ["</s> 9 times", "'<sep>' does not occur in"]),
    (f"a story{END}" * 60, ["--separator", END], []),
    ("a story\r\n\r\n" * 9, ["--separator", "\n\n"],
     ["'\\n\\n' does not occur in", r"its lines end with CRLF: type --separator $'\r\n\r\n'"]),
    ("a story\r\n\r\n" * 9, ["--separator", "\r\n\r\n"], []),
    ("a story\n\n" * 9, ["--separator", "\n\n"], []),
    ("a story\r\n" * 9, ["--separator", "==="], ["'===' does not occur in"]),
])  # fmt: skip
def test_separators_that_are_not_given_or_do_not_occur(text, words, parts, here, capsys):
    (here / "a.txt").write_bytes(text.encode())
    words = ["data", "prepare", "a.txt", "--tokenizer", "bytes", "--out", "out", *words]
    cli.main(words, StandIn())
    said = capsys.readouterr().err
    assert len(said.splitlines()) == len([part for part in parts if "type" not in part]) - (
        END in text and bool(parts)
    )
    for part in parts:
        assert part in said


def test_the_first_document_is_trained_on_and_its_equals(here):
    """Nothing is held out by chance, or all: then the last tenth of the tokens is."""
    for texts in (["same"] * 20, ["one of them", "same"] * 9, STORIES[:2], ["x" * 30]):
        (here / "a.txt").write_text("<sep>".join(texts), encoding="utf-8")
        prepared("a.txt", "--separator", "<sep>", "--tokenizer", "bytes")
        train, held_out = (np.fromfile(f"out/{part}.bin", "<u2") for part in ("train", "val"))
        assert len(train)
        assert len(held_out)
        count = len("".join(texts).encode()) + len(texts)
        assert len(train) + len(held_out) == count
        documents = [file.documents for file in read_dataset(here / "out")[0].files]
        assert sum(documents) == len(texts)
        shutil.rmtree("out")


def test_what_a_killed_preparation_left_is_removed(here):
    for number in (2**22 + 1, os.getpid()):  # the first is above the largest process number
        (here / f"out.partial-{number}").mkdir()
        (here / f"out.partial-{number}" / "train.bin").write_bytes(b"ab")
    (here / f"out.partial-{os.getpid()}").rename(here / "out.partial-1")
    prepared("stories.txt", "--tokenizer", "bytes")
    assert [path.name for path in here.glob("out.partial-*")] == ["out.partial-1"]


# --- refusals


@pytest.mark.parametrize(("words", "parts"), [
    ("", ["data : the only action is", "no text files", "--tokenizer: is", "--out: is missing"]),
    ("prepare stories.txt --tokenizer train:257 --out stories.txt",
     ["train:257: a new tokenizer has 258 to 1,048,576", "--out stories.txt: exists"]),
    ("prepare stories.txt --tokenizer train:1e4 --out out --seprator x",
     ["train:1e4: a new tokenizer has", "did you mean --separator"]),
    ("prepare stories.txt nowhere --tokenizer byte --out out --separator=",
     ["nowhere: no such file", "byte: no such file", "--separator '': must not be empty"]),
    ("prepare stories.txt --tokenizer bytes --out=", ["--out: is missing"]),
    ("list stories.txt --tokenizer bytes --out out", ["data list: the only action is"]),
])  # fmt: skip
def test_all_mistakes_of_the_arguments_at_once(words, parts, here):
    assert_refused(2, parts, "data", *words.split())


@pytest.mark.parametrize(("name", "content", "part"), [
    ("zero.txt", b"text\0", "zero.txt: is not text: byte 4 is zero"),
    ("latin.txt", b"caf\xe9 au lait", "latin.txt: is not UTF-8 text: byte 3 cannot be decoded"),
    ("empty.txt", b"", "there is too little text: 0 tokens"), ("missing.txt", None, "no such file"),
    ("short.txt", b"a", "there is too little text"),
])  # fmt: skip
def test_files_without_text(name, content, part, here):
    if content is not None:
        (here / name).write_bytes(content)
    assert_refused(65, [part], "data", "prepare", name, "--tokenizer", "bytes", "--out", "out")
    assert not list(here.glob("out*"))


def test_a_new_tokenizer_needs_the_library(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert_refused(
        69,
        ["pip install '.[text]'"],
        "data",
        "prepare",
        "stories.txt",
        "--tokenizer",
        "train:300",
        "--out",
        "out",
    )
    assert not list(here.glob("out*"))


@pytest.mark.text
def test_a_tokenizer_without_an_end_of_text(here):
    save_tokenizer(here / "model")
    path = here / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace(END, "<unk>"))
    assert_refused(
        65,
        ["no file says which id ends a text", "eos_token"],
        "data",
        "prepare",
        "stories.txt",
        "--tokenizer",
        "model",
        "--out",
        "out",
    )
    (here / "model" / "tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    assert prepared("stories.txt", "--tokenizer", "model")[1]["end_of_text"] == 0


@pytest.mark.parametrize("place", ["write", "described"])
def test_a_full_disk_leaves_nothing(place, here, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prepare_module.Part, place, full)
    with pytest.raises(OutputError, match=r"out: can't be written: No space left") as caught:
        cli.main(
            ["data", "prepare", "stories.txt", "--tokenizer", "bytes", "--out", "out"], StandIn()
        )
    assert caught.value.exit_code == 74
    assert not list(here.glob("out*"))


@pytest.mark.slow
def test_a_signal_leaves_nothing(tmp_path):
    """Also a program that ends at once takes its half-written folder with it."""
    with open(tmp_path / "text.txt", "wb") as file:
        file.writelines(b"some text to read\n" * 4096 for _ in range(4000))
    words = [*PROGRAM, "data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "out"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.DEVNULL, env={**os.environ, **environment()}
    )
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
    prepared("stories.txt", "--separator", "<sep>", "--tokenizer", "bytes")
    return here / "out"


def problems(folder, vocab_size=257, thorough=True):
    with pytest.raises(DataError) as caught:
        load_source((str(folder),), vocab_size, thorough)
    return "\n".join(caught.value.problems)


def test_what_is_read_back(folder):
    source = load_source((str(folder),), 300)
    found, digest = read_dataset(folder)
    assert source.what == (
        f"{sum(file.tokens for file in found.files):,} tokens (uint16)"
        f" of 40 documents from {folder}"
    )
    assert source.tokens.digest == source.validation().tokens.digest == digest
    assert len(source.tokens) == sum(file.tokens for file in found.part("train"))


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
    assert "is a folder, a pipe or a device" in problems(folder)
    path.unlink()
    assert "No such file" in problems(folder)


def test_another_tokenizer_and_a_small_model(folder):
    assert "is outside the vocabulary of 256; type --vocab-size 257" in problems(folder, 256)
    (folder / "tokenizer.json").write_text("{}")
    assert "the tokenizer is not the one that made the tokens" in problems(folder)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer here" in problems(folder)
    with pytest.raises(DataError, match="a prepared folder is given alone; leave out other"):
        load_source(("other", str(folder)), 257)


NAMES = "does not name train.bin and val.bin, each once"


@pytest.mark.parametrize(("change", "part"), [
    ({"format": 2}, "has format 2; this version reads 1"), ({"format": 0}, "format 0"),
    ({"dtype": "int64"}, "names the dtype 'int64'"), ({"vocab_size": 2**40}, "vocabulary of"),
    ({"files": []}, NAMES), ({"files": "train"}, "must be a list"),
    ({"more": 1}, "unknown key 'more'"), ({"tokenizer": "a\nb"}, "not a legal str"),
    ({"files/0/name": "../out/train.bin"}, NAMES), ({"files/0/name": "/etc/passwd"}, NAMES),
    ({"files/0/name": "val.bin"}, NAMES), ({"files/0/name": "test.bin"}, NAMES),
    ({"files/0/tokens": -1}, "without tokens"), ({"files/0/tokens": 2**60}, "train.bin: has"),
    ({"files/0/tokens": 1.5}, "not a legal int"),
    ({"files/0/sha256": "x" * 64}, "other tokens than were written"),
    ({"files/0/sha256": ""}, "other tokens than were written"),
])  # fmt: skip
def test_a_description_that_cannot_be(change, part, folder):
    path = folder / "dataset.json"
    content = json.loads(path.read_text())
    for key, value in change.items():
        *way, last = key.split("/")
        inside = content
        for step in way:
            inside = inside[int(step) if step.isdigit() else step]
        inside[last] = value
    path.write_text(json.dumps(content))
    assert part in problems(folder)


# --- runs on a prepared folder: the vocabulary, the held-out part, resuming, and text


SMALL = (
    "--layers",
    1,
    "--d-model",
    8,
    "--heads",
    2,
    "--ffn",
    8,
    "--seq-len",
    16,
    "--batch-size",
    4,
    "--num-microbatches",
    1,
)


def prepare(tokenizer, out):
    prepared("stories.txt", "--separator", "<sep>", "--tokenizer", tokenizer, out=out)


@pytest.fixture
def of_bytes(here):
    """The folder to work in, with prepared data of 257 ids in `bytes`."""
    prepare("bytes", "bytes")
    return here


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ((), 257),
        (("--vocab-size", 300), 300),
        (("--preset", "gpt2"), 50257),
        (("--config", "a.toml"), 400),
    ],
)
def test_the_model_has_the_vocabulary_of_its_data(words, size, of_bytes):
    (of_bytes / "a.toml").write_text("vocab-size = 400\n")
    text = printed("train", "--print-config", "--data", "bytes", *words)
    assert f"\nvocab-size = {size}\n" in text
    assert ("# --vocab-size 257, the vocabulary of the data" in text) == (size == 257)


def test_the_fingerprint_covers_all_files(of_bytes):
    def found(name):
        source = load_source((name,), 257)
        arrays = [source.tokens, source.held_out]
        digests = {
            piece.file.name: hashlib.sha256((of_bytes / piece.file.name).read_bytes()).hexdigest()
            for piece in pieces_of(arrays)
        }
        return fingerprint(arrays, digests)["files"]

    before = found("bytes")
    shutil.copytree("bytes", "copy")
    assert found("copy") == before
    path = of_bytes / "copy" / "dataset.json"
    path.write_text(path.read_text() + " ")  # such as another tokenizer of the same tokens
    assert found("copy") != before


@pytest.mark.text
def test_train_go_on_and_generate_with_the_tokenizer_of_the_data(of_bytes):
    """The run keeps the tokenizer from its first step on; another data folder is refused."""
    save_tokenizer(of_bytes / "model")
    prepare("model", "data")
    result = alone(
        "train",
        "--data",
        "data",
        "--out",
        "run",
        "--steps",
        2,
        *SMALL,
        "--sample-tokens",
        5,
        cwd=of_bytes,
    )
    assert result.returncode == 0, result.tail()
    assert "V 400, tied head" in result.stdout
    source = load_source(("data",), 400)
    assert f"{len(source.tokens):,} to train on, {len(source.held_out):,} held out" in result.stdout
    said = result.stdout.split("text generated from 'The ':\n")[1].split("\n\n")[0]
    said = "\n".join(line.removeprefix("| ") for line in said.splitlines())
    kept = load_tokenizer("run/weights")
    assert kept.digest == load_tokenizer("model").digest
    assert (
        json.loads((of_bytes / "run/weights/generation_config.json").read_text())["eos_token_id"]
        == kept.end
        == 0
    )
    assert {path.name for path in (of_bytes / "run" / "weights").iterdir()} & {*FILES} == {
        "tokenizer.json"
    }
    again = alone(
        "generate",
        "run",
        "--sample-tokens",
        5,
        cwd=of_bytes,
    )
    assert harmless(again.stdout).rstrip() == said.rstrip()
    shutil.copytree("data", "other")
    path = of_bytes / "other" / "train.bin"
    flip(path, 0)
    words = ("train", "--resume", "auto", "--out", "run", "--steps", 3)
    assert_refused(65, ["has other tokens than were written"], *words, "--data", "other")
    description = json.loads((of_bytes / "other" / "dataset.json").read_text())
    description["files"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (of_bytes / "other" / "dataset.json").write_text(json.dumps(description))
    assert_refused(65, ["--data: has changed since the checkpoint"], *words, "--data", "other")
    np.testing.assert_array_equal(load_source(("other",), 400).tokens[4:], source.tokens[4:])


def test_a_large_vocabulary_has_no_table_of_pairs(of_bytes):
    """The square of 50,257 numbers would take 20 GB."""
    done = alone(
        "train",
        "--data",
        "bytes",
        *SMALL,
        "--vocab-size",
        600,
        "--steps",
        1,
        "--sample-tokens",
        0,
        "--eval-tokens",
        64,
        cwd=of_bytes,
    ).ended()
    assert "byte-bigram" not in done.stdout


@pytest.mark.text
def test_held_out_data_of_another_tokenizer_is_refused(of_bytes):
    prepare("train:300", "other")
    assert_refused(
        65,
        ["--val-data: its tokens were made by another", "--tokenizer other"],
        "train",
        "--data",
        "other",
        "--val-data",
        "bytes",
    )


def test_weights_keep_their_vocabulary(of_bytes):
    """No flag can change it, so none is named."""
    words = ("train", "--data", "bytes", "--init-from")
    save(
        fresh(layers=1, d_model=8, heads=2, ffn=8, seq_len=16, vocab_size=256), of_bytes / "weights"
    )
    assert_refused(
        65, ["vocabulary of 256; give data prepared with the tokenizer"], *words, "weights"
    )
