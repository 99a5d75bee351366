"""Files from outside: each hostile or broken one ends with one sentence, immediately.

A run folder of another user: nothing outside it is written.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import stat
import sys
from functools import partial

import numpy as np
import pytest
from helpers import run_command
from hypothesis import given
from hypothesis import strategies as st
from in_process import alone, assert_refused, at_once
from one_rank import fresh
from program import LIMIT, block_of, environment, metrics, mpipar, one_block
from safetensors.numpy import save
from state_cases import config_for, savers_of, workers_of

from mpipar.config.text import harmless, printable, shown
from mpipar.errors import DataError, OutputError, UsageError
from mpipar.run import folder as run_folder
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.checkpoint.weights import write_tokenizer_files
from mpipar.run.console.output import GrowingFile, Log, write_text
from mpipar.run.files import bounded, no_links
from mpipar.run.files.bounded import recognize
from mpipar.run.process import lock
from mpipar.run.trace import trace_file

MANY = 400_000


JSON = {
    "nothing": ("", "is not JSON"),
    "depth": ("[" * MANY, "more than 32 deep"),
    "depth that Python reads": ('{"a":' * 40 + "1" + "}" * 40, "more than 32 deep"),
    "5,000 digits": (f'{{"a": {"9" * 5000}}}', "is not JSON: .*digits"),
    "50 digits": (f'{{"a": [-{"9" * 50}]}}', "may not have the value"),
    "more than float64": ('{"a": [1e999]}', "may not have the value inf"),
    "a zero byte": ('["\\u0000"]', "may not have the value"),
    "half a character": ('["\\ud800"]', "may not have the value"),
    "a key twice": (json.dumps({f"k{i}": 1 for i in range(90_000)})[:-1] + ',"k9":1}', "twice"),
}
TOML = {
    "no value": ("x" * MANY, "is not TOML"),
    "depth": ("a = " + "[" * MANY, "more than 32 deep"),
    "tables in tables": ("a = " + "{b = " * 40 + "1" + "}" * 40, "more than 32 deep"),
    "hexadecimal digits": ("layers = 0x" + "f" * 5000, "is not TOML"),
    "a zero byte": ('out = "run\\u0000"', "may not have the value"),
}


def toml(path):
    return bounded.read_toml(path, UsageError, where="--config a")


@pytest.mark.parametrize(("read", "error", "text", "part"), [
    *((partial(bounded.read_json, most_bytes=1 << 22), DataError, *one) for one in JSON.values()),
    *((toml, UsageError, *one) for one in TOML.values()),
])  # fmt: skip
def test_what_is_hostile_or_broken(read, error, text, part, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with at_once(), pytest.raises(error, match=rf"(a\.json|^--config a): .*{part}"):
        read(path)


def test_a_file_that_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path, part in [
        (tmp_path / "pipe", "a pipe or a device; give a regular file"),
        (tmp_path / "folder", "a folder, a pipe"),
        ("/dev/zero", "or a device"),
        (tmp_path / "none", "No such file"),
        ("a\0b", "null byte"),
    ]:
        with at_once(), pytest.raises(DataError, match=part):
            bounded.read_json(path)


def test_size_and_encoding_of_a_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DataError, match="is not UTF-8 text: byte 7 cannot be decoded"):
        bounded.read_json(path)
    os.truncate(path, 1 << 40)  # a hole: nothing is stored, and nothing may be allocated
    with at_once(), pytest.raises(DataError, match="has more than 1,048,576 bytes"):
        bounded.read_json(path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text('ab\\"\n\u20ac')
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
)


@given(VALUES)
def test_every_other_value_is_read_as_it_is(value):
    assert bounded.parse_json(json.dumps(value)) == value


def test_text_that_a_terminal_would_obey_is_spelled_out():
    assert harmless("a\x1b[31mb\rc\x9bd\u202ee\nf\tg") == "a\\x1b[31mb\\rc\\x9bd\\u202ee\nf\tg"
    assert printable("\x07\u20ac") == "\\x07\u20ac"
    assert shown("\x1b" + "x" * 1000, 10) == "'\\x1bxxxxx..."
    assert shown(["a"]) == "['a']"


# --- A file is named by its first bytes before it is parsed


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "Git LFS"),
        (b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", "PyTorch"),
        (b"PK\x03\x04" + bytes(26) + b"a.txt", "zip"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"\n<!DOCTYPE html>\n<html></html>", "web page"),
        ("\ufeffonce".encode(), "byte order mark"),
        ("once".encode("utf-16"), "UTF-16"),
        (b'{"text": "a"}\r\n{"text": "b"}\n', "JSON lines"),
        (save({"a": np.zeros(3)}), "safetensors"),
        (b"Once upon a time, <html> was young.\n", None),
        (json.dumps({"model_type": "gpt2", "a": {"b": 1}}, indent=1).encode(), None),
        (np.arange(100, dtype=np.uint16).tobytes(), None),
    ],
)
def test_a_file_is_named_by_its_first_bytes(tmp_path, content, word):
    (tmp_path / "file").write_bytes(content)
    found = recognize(tmp_path / "file")
    assert (word in found) if word else found is None, found


# --- inputs without bounds: each ends with exit code 2 or 65 and one sentence, immediately


NINES = "9" * 5000
SIZES = {
    "explain --d-model 2147483646": "--d-model 2147483646: must be at most 131,072",
    f"train --layers {NINES}": "must be a whole number",
    "train --num-microbatches 65536": "use a smaller --num-microbatches",
    "verify --schedule interleaved --chunks 1024 --num-microbatches 512": "use a smaller --num-",
    f"train --layout dp={NINES}": "is not understood",
    "explain --layout dp=999999999,pp=4096,tp=65536": "at most 131,072 can be explained",
    f"train --memory-limit {NINES}": "must be bytes",
    "schedule 1f1b --num-microbatches 2147483647": "must be at most 65,536",
    "schedule 1f1b --pp 2147483647 --num-microbatches 1": "must be at most 4,096",
    "schedule 1f1b --costs 1e999999999,1,1": "at most 9 digits",
}


@pytest.mark.parametrize("words", SIZES, ids=lambda words: words[:40])
def test_sizes_are_bounded_before_anything_is_made(words):
    with at_once():
        assert_refused(2, [SIZES[words]], *words.split())


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


@pytest.mark.parametrize(("words", "code"), [
    ("train --config PIPE", 2), ("train --data PIPE", 65), ("schedule --from-csv PIPE", 2),
])  # fmt: skip
def test_a_pipe_is_no_file(words, code, tmp_path):
    os.mkfifo(tmp_path / "PIPE")
    with at_once():
        part = "a folder, a pipe or a device"
        assert_refused(code, ["PIPE", part], *words.split(), folder=tmp_path)


# --- a run folder of another user


KINDS = {  # what stands in the place of a file: plant it at a path
    "a link": lambda path, outside: path.symlink_to(outside),
    "a hard link": lambda path, outside: os.link(outside, path),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
}

WRITERS = {
    "trace": lambda run: trace_file.write_meta(run, {}),
    "weights": lambda run: checkpoint.save(fresh(), run / "weights"),
    "hang": lambda run: no_links.replace_file("hang/rank-00000.json", [b"{}"], root=run),
    "checkpoints": lambda run: savers_of(workers_of(config_for(), 1), run / "checkpoints")[0].save(
        1
    ),
}

CONTENT = "a file of the user\n"
TINY = """train --data text.txt --layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4
    --num-microbatches 2 --sample-tokens 4 --save-interval 2 --steps 4 --out run""".split()


@pytest.fixture
def victim(tmp_path):
    """(run folder, a file outside it that must stay as it is, a folder outside it likewise)."""
    run, outside, folder = tmp_path / "run", tmp_path / "outside.txt", tmp_path / "outside"
    run.mkdir()
    folder.mkdir()
    outside.write_text(CONTENT)
    (folder / "keep.txt").write_text(CONTENT)
    yield run, outside, folder
    assert outside.read_text() == CONTENT
    assert [path.name for path in folder.iterdir()] == ["keep.txt"]


# --- files that grow


@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_file_is_a_regular_file_of_the_run(kind, victim):
    (run, outside, _), name = victim, run_folder.LOG
    KINDS[kind](run / name, outside)
    with (
        at_once(),
        pytest.raises(OutputError, match=f"{name}: can't be written: {name} is a link, "),
    ):
        GrowingFile(run, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_replaced_ends_no_link(kind, victim):
    """What stands in its place, or in that of the file under its first name, is not opened."""
    run, outside, folder = victim
    for name in ("report.html", "report.html.partial"):
        if kind == "a folder":
            (run / name).symlink_to(folder)
        else:
            KINDS[kind](run / name, outside)
    with at_once():
        no_links.replace_file("report.html", [b"new"], root=run)
    assert (run / "report.html").read_bytes() == b"new"
    assert stat.S_ISREG((run / "report.html").lstat().st_mode)
    assert [path.name for path in run.iterdir()] == ["report.html"]


@pytest.mark.fault
@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_of_the_run_is_no_link(name, victim):
    run, _, folder = victim
    (run / name).symlink_to(folder)
    with pytest.raises((OSError, OutputError), match=f"{name} is a link"):
        WRITERS[name](run)
    with pytest.raises(OSError, match="is a link"):
        write_tokenizer_files({"tokenizer.json": b"{}"}, run / name)


def test_what_is_read_in_a_run_folder_is_no_link(victim):
    run, _, folder = victim
    (run / "result.json").symlink_to(folder / "keep.txt")
    with pytest.raises(DataError, match="is a link"):
        bounded.read_json("result.json", root=run)
    (run / "checkpoints").symlink_to(folder)
    with pytest.raises(DataError, match="is a link"):
        committed_steps(run / "checkpoints")


@pytest.mark.fault
def test_a_run_does_not_go_on_in_a_folder_with_planted_links(tmp_path, text_folder):
    name = "log.txt"
    alone(*TINY, "--seq-len", 40, cwd=tmp_path).ended()
    (tmp_path / "keys").write_text(CONTENT)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "keys")
    code, block = one_block(
        mpipar(*TINY, "--seq-len", 40, "--steps", 6, "--resume", "auto", cwd=tmp_path)
    )
    assert (code, "Traceback" in block) == (74, False)
    assert f"{name} is a link" in block
    assert (tmp_path / "keys").read_text() == CONTENT


# --- metrics at a resume


def lines_of(steps):
    return [json.dumps({"step": step, "loss": step / 3}).encode() + b"\n" for step in steps]


DAMAGED = (
    b'{"step": 2, "loss": \xff}',
    b"[" * 200_000,
    b"[2]",
    b'{"step": 2, "comm": 3}',
    b'{"step": 2, "comm": {"dp": 3}}',
)


@pytest.mark.fault
@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda damaged: repr(damaged[:20]))
def test_damaged_lines_are_removed_and_the_checkpoint_decides(damaged, tmp_path):
    """In place of the second line; the last one was not written to its end."""
    lines = lines_of(range(1, 6))
    content = b"".join([lines[0], damaged + b"\n", *lines[2:], b'{"step": 6, "lo'])
    for name in (run_folder.METRICS, run_folder.EVALUATIONS):
        (tmp_path / name).write_bytes(content)
    with at_once():
        notes = run_folder.truncate_after(tmp_path, 4)
    assert ["1 damaged line removed" in note for note in notes] == [True, True]
    for name in (run_folder.METRICS, run_folder.EVALUATIONS):
        assert (tmp_path / name).read_bytes() == b"".join([lines[0], *lines[2:4]])


# --- what changes while a run continues


@pytest.mark.parametrize("how", ["removed", "replaced by a link"])
def test_a_file_that_lost_its_name_is_written_anew(how, victim):
    run, outside, _ = victim
    file = GrowingFile(run, "metrics.jsonl")
    file.write("one\n")
    assert file.sync() == ""
    path = run / "metrics.jsonl"
    path.unlink()
    if how == "replaced by a link":
        path.symlink_to(outside)
    file.write("two\n")
    assert "written again" in file.sync()
    file.write("three\n")
    assert file.sync() == ""
    file.close()
    assert path.read_text() == "one\ntwo\nthree\n"
    assert stat.S_ISREG(path.lstat().st_mode)


MOVING = """
import os, sys
from mpipar import cli
from mpipar.run.process.session import guard
from mpipar.train.worker import Worker
change, plain = sys.argv.pop(1), Worker.train_step
def train_step(self, step, *rest):
    if step == 3:
        exec(change)
    return plain(self, step, *rest)
Worker.train_step = train_step
guard(cli.main, sys.argv[1:])
"""


def changed_in_step_3(change, folder):
    return run_command([sys.executable, "-c", MOVING, change, *TINY], LIMIT, environment(), folder)


@pytest.mark.fault
def test_a_run_folder_that_was_moved_is_said(tmp_path, text_folder):
    result = changed_in_step_3("os.rename('run', 'old')", tmp_path).ended()
    assert "WARNING: run is gone" in result.stdout
    assert "weights, checkpoints, metrics, report.html, config.toml and log.txt are in run\n" in (
        result.stdout
    )
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "log.txt").read_text() == result.stdout
    assert [step for step, _ in committed_steps(tmp_path / "old" / "checkpoints")] == [2]
    alone(*TINY, "--resume", "auto", "--steps", 5, cwd=tmp_path).ended()


@pytest.mark.fault
def test_a_folder_that_another_job_has_taken_is_not_written(tmp_path, text_folder):
    result = changed_in_step_3(
        "os.rename('run', 'old'); os.mkdir('run'); open('run/lock', 'w').write('x')", tmp_path
    )
    block_of(result, 74, "has the folder now")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.fault
def test_checkpoints_behind_a_planted_link_are_not_deleted(victim):
    run, _, _ = victim
    (saver,) = savers_of(workers_of(config_for(), 1), run / "checkpoints", keep=1)
    saver.save(1)
    (run / "checkpoints").rename(run.parent / "theirs")
    (run.parent / "theirs" / "step-00000009.partial-1").mkdir()
    (run / "checkpoints").symlink_to(run.parent / "theirs")
    with pytest.raises(OutputError, match="checkpoints is a link"):
        saver.save(2)
    assert {path.name for path in (run.parent / "theirs").iterdir()} == {
        "step-00000001",
        "step-00000009.partial-1",
    }


def test_only_files_of_checkpoints_are_deleted(victim):
    run, _, folder = victim
    inside = run / "checkpoints"
    (saver,) = savers_of(workers_of(config_for(), 1), inside, keep=1)
    saver.save(1)
    (inside / "step-00000001" / "notes.txt").write_text(CONTENT)
    for name in ("step-00000008.partial-2", "step-00000002"):
        (inside / name).symlink_to(folder)
    saver.save(2)
    assert committed_steps(inside) == [(2, inside / "step-00000002")]
    (notes,) = inside.glob("*/notes.txt")
    assert [*notes.parent.iterdir()] == [notes]


# --- the lock


@pytest.mark.fault
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a hard link"])
def test_a_lock_that_is_no_file_is_refused(kind, victim):
    run, outside, _ = victim
    KINDS[kind](run / lock.NAME, outside)
    with at_once(), pytest.raises(OSError, match="lock is a link, ") as refused:
        lock.acquire(run, "token")
    with pytest.raises(OutputError), run_folder.said(run, "no"):
        raise refused.value


# --- outputs


@pytest.mark.fault
def test_a_picture_in_a_missing_folder_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"):
        write_text(tmp_path / "none" / "picture.svg", "")


def test_no_half_of_a_picture_is_left_by_a_full_disk(tmp_path):
    path, (soft, hard) = tmp_path / "picture.svg", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match="File too large; name another file"):
            write_text(path, "x" * 9000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


def test_no_foreign_text_is_a_line_of_the_log(tmp_path):
    file = GrowingFile(tmp_path, "log.txt")
    Log(0, file)("a\rb\u2028c\x85d")
    assert (tmp_path / "log.txt").read_text() == "a\\rb\\u2028c\\x85d\n"
