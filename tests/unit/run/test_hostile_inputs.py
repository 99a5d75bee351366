"""Inputs without bounds: each ends with exit code 2 or 65 and one sentence, immediately.

`test_files.py` tests the reader of JSON and TOML alone. Here the commands read.
"""

import json
import os

import pytest
from in_process import assert_refused, at_once

NINES = "9" * 5000
SIZES = {
    "--d-model 2147483646": "--d-model 2147483646: must be at most 131,072",
    "--layers 2e9": "--layers 2e9: must be a whole number",
    "--layers 2000000000": "--layers 2000000000: must be at most 1,024",
    f"--layers {NINES}": "must be a whole number",
    "--num-microbatches 2147483647": "must be at most 65,536",
    "--num-microbatches 65536": "use a smaller --num-microbatches",
    "--schedule interleaved --chunks 2147483647": "must be at most 1,024",
    "--schedule interleaved --chunks 1024 --num-microbatches 512": "use a smaller --num-",
    f"--layout dp={NINES}": "is not understood",
    "--layout dp=999999999,pp=4096,tp=65536": "at most 131,072 can be explained",
    f"--memory-limit {NINES}": "must be bytes",
    f"--rank {NINES}": "must be a whole number",
}
COUNTS = {
    "1f1b --num-microbatches 2147483647": "at most 262,144 forward passes",
    "interleaved --chunks 2147483647": "at most 262,144 forward passes",
    "1f1b --pp 2147483647 --num-microbatches 1": "at most 262,144 forward passes",
    "--compare --num-microbatches 2147483647": "must be at most 8,192",
    "1f1b --costs 1e999999999,1,1": "'1e999999999' is not a number of at most 9 digits",
    f"1f1b --costs {NINES},1,1": "is not a number of at most 9 digits",
    "1f1b --latency 1e-999999999": "'1e-999999999' is not a number",
}


@pytest.mark.parametrize("words", SIZES, ids=lambda words: words[:40])
def test_sizes_are_bounded_before_anything_is_made(words):
    for command in (
        ("explain",)
        if "explained" in SIZES[words] or "rank" in words
        else ("explain", "train", "verify")
    ):
        if (command, words[:14]) != ("verify", "--memory-limit"):
            with at_once():
                assert_refused(2, [SIZES[words]], command, *words.split())


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "n_positions", "vocab_size"])
def test_the_shape_in_a_config_json_is_bounded(name, tmp_path):
    shape = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 8,
        "n_positions": 8,
        "vocab_size": 256,
    } | {name: 10**9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with at_once():
        assert_refused(65, [str(10**9)], "train", "--init-from", tmp_path)
        assert_refused(65, [str(10**9)], "generate", tmp_path)


@pytest.mark.parametrize("words", COUNTS, ids=lambda words: words[:40])
def test_counts_of_a_schedule_are_bounded(words):
    with at_once():
        assert_refused(2, [COUNTS[words]], "schedule", *words.split())


@pytest.mark.parametrize(("text", "part"), [
    ("0F9999999\n", "is not an instruction"), (f'"{"x" * 200_000}"\n', "larger than field limit"),
    ("0F0,1F0," * 300_000, "more than 524,288 instructions"),
    ("0F0\n" * (3 << 20), "the limit is 8,388,608"),
], ids=lambda value: value[:20])  # fmt: skip
def test_csv_files_are_bounded(text, part, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with at_once():
        assert_refused(2, [part], "schedule", "--from-csv", path)
        assert_refused(2, [part], "train", "--schedule-csv", path, "--steps", "1")


@pytest.mark.parametrize("words", [
    "train --config PIPE", "explain --machine PIPE.toml", "train --data PIPE",
    "schedule --from-csv PIPE", "train --val-data PIPE",
])  # fmt: skip
def test_a_pipe_is_no_file(words, tmp_path):
    os.mkfifo(tmp_path / "PIPE")
    os.mkfifo(tmp_path / "PIPE.toml")
    code = 2 if "--config" in words or "csv" in words else 65
    with at_once():
        assert_refused(
            code, ["PIPE", ": is a folder, a pipe or a device"], *words.split(), folder=tmp_path
        )
