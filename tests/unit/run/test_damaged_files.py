"""Every kind of file that a user passes in, damaged at random: exit code 2 or 65, or it is read.

A damage that leaves a legal file is no failure of the reader. An exception that is no UserError
would be exit code 70, and one that takes long a hang.
"""

import contextlib
import io
import json
import random
import re

import numpy as np
import pytest
from in_process import StandIn, at_once
from one_rank import fresh, loaded, split_weights
from state_cases import config_for, saved
from state_cases import loaded as state
from trace_cases import write_trace

from mpipar import cli
from mpipar.errors import DataError, UsageError
from mpipar.run.checkpoint import manifest
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.formats import start_notes
from mpipar.run.checkpoint.weights import config_texts, read_tokenizer_files
from mpipar.run.data.source import load_source
from mpipar.run.files.bounded import read_json

FEW, MANY = range(12), range(12, 72)
NUMBERS = (b"-1", b"0", b"1e308", b"NaN", b"9" * 25, b"9" * 5000, b"null", b'"x"', b"[]", b"{}")
TEXTS = (
    b'"\\u001b[31m"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"<script>"',
    b'"' + b"k" * 999 + b'"',
    b"3",
)
INSERTED = (b"[" * 5000, b"{", b"}", b'"', b"\0", b"\n", b"\xff", b"\x1b[2J")


def damaged(content: bytes, seed: int) -> bytes:
    """The content with one to three changes; the seed chooses them."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = _changed(content, chance)
    return content


def _changed(content, chance):
    place = chance.randrange(len(content) + 1)
    before, after = content[:place], content[place:]
    return chance.choice(
        (
            before,
            before + after[chance.choice((1, 2, 40, 4000)) :],
            before + before[-chance.choice((1, 20, 300)) :] + after,
            before + bytes([chance.randrange(256)]) + after[1:],
            before + chance.choice(INSERTED) + after,
            *(_swapped(content, chance, rb"-?\d+(\.\d+)?(e-?\d+)?", NUMBERS) for _ in range(3)),
            _swapped(content, chance, rb'"[^"\n]*"', TEXTS),
        )
    )


def _swapped(content, chance, pattern, others):
    """One thing that the pattern finds, replaced by another."""
    found = list(re.finditer(pattern, content[:200_000]))
    if not found:
        return content
    one = chance.choice(found)
    return content[: one.start()] + chance.choice(others) + content[one.end() :]


def run(command):
    """Run a command, words or a function. It must end well or with an error that is the file's."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), at_once(), contextlib.suppress(UsageError, DataError):
        call(command)
    assert "\x1b" not in text.getvalue()


def call(command):
    """The exit code of a command."""
    if callable(command):
        command()
        return 0
    return cli.main([str(word) for word in command], StandIn())


def of_trace(name):
    def make(folder):
        write_trace(folder)
        return folder / name, [
            ("trace", folder),
            ("trace", folder, "--html", folder / "a.html"),
            ("trace", folder, "--perfetto", folder / "a.json"),
            ("compare", folder, folder),
        ]

    return make


def of_toml(folder):
    path = folder / "config.toml"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        cli.main(["train", "--print-config", "--schedule", "interleaved"], StandIn())
    path.write_text(text.getvalue())
    return path, [("explain", "--config", path), ("train", "--print-config", "--config", path)]


def of_csv(folder):
    path = folder / "schedule.csv"
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["schedule", "interleaved", "--csv", str(path)], StandIn())
    return path, [("schedule", "--from-csv", path)]


def of_weights(name, count=1, **values):
    """Without the command: what `generate` and --init-from do with a folder of weights."""

    def make(folder):
        checkpoint.save(fresh(**values), folder)
        if count > 1:
            split_weights(folder, count)
        return folder / name, [
            lambda: loaded(folder, "float32"),
            lambda: start_notes(folder),
            lambda: read_tokenizer_files(folder),
            lambda: config_texts(folder, {"vocab_size": 17}),
        ]

    return make


LLAMA = {
    "arch": "llama",
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rope",
    "head_dim": 4,
    "bias": "none",
    "tied": False,
    "rope_scaling": (4.0, 1.0, 3.0, 12.0),
}


def of_tokens(folder):
    path = folder / "tokens.bin"
    path.write_bytes(
        np.array([20240520, 1, 999, *[0] * 253], "<i4").tobytes()
        + np.arange(999, dtype="<u2").tobytes()
    )
    return path, [lambda: np.asarray(load_source((str(path),), 1000).tokens)]


def of_dataset(folder):
    """A prepared folder, whose description is damaged."""
    (folder / "text.txt").write_text("a text, again and again. " * 40)
    out = folder / "prepared"
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(
            [
                "data",
                "prepare",
                str(folder / "text.txt"),
                "--tokenizer",
                "bytes",
                "--out",
                str(out),
            ],
            StandIn(),
        )
    return out / "dataset.json", [
        lambda: np.asarray(load_source((str(out),), 300).tokens),
        ("train", "--print-config", "--data", out),
    ]


def of_manifest(folder):
    config = config_for(layers=1, d_model=4, heads=2, ffn=3, seq_len=2, vocab_size=5)
    path = saved(config, 1, folder)
    return path / "manifest.json", [lambda: state(config, 1, path), lambda: resigned(path)]


def resigned(path):
    """Read a manifest whose digest fits its content, whatever that is."""
    name = path / "manifest.json"
    content = read_json(name)
    if isinstance(content, dict):
        content.pop("sha256", None)
        digest = manifest._digest(content)
        name.write_text(json.dumps(content | {"sha256": digest}))
    manifest.read_manifest(path)


KINDS = {
    "meta.json": of_trace("trace/meta.json"),
    "rank": of_trace("trace/rank-00001.bin"),
    "metrics.jsonl": of_trace("metrics.jsonl"),
    "TOML": of_toml,
    "CSV": of_csv,
    "config.json": of_weights("config.json"),
    "config.json of Llama": of_weights("config.json", **LLAMA),
    "index.json": of_weights("model.safetensors.index.json", count=3),
    "generation_config.json": of_weights("generation_config.json"),
    "model.safetensors": of_weights("model.safetensors"),
    ".bin": of_tokens,
    "dataset.json": of_dataset,
    "manifest.json": of_manifest,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{kind: (file, commands that read it)}; each command takes the files as they are."""
    made = {}
    for kind, make in KINDS.items():
        path, commands = make(tmp_path_factory.mktemp("whole"))
        with contextlib.redirect_stdout(io.StringIO()):
            for command in commands:
                assert not call(command), kind
        made[kind] = path, commands
    return made


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_read_or_refused(kind, seeds, whole):
    path, commands = whole[kind]
    content = path.read_bytes()
    try:
        for seed in seeds:
            path.write_bytes(damaged(content, seed))
            for command in commands:
                try:
                    run(command)
                except BaseException as error:
                    error.add_note(f"seed {seed}, {command}")
                    raise
    finally:
        path.write_bytes(content)
