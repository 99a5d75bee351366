"""A run folder of another user: nothing outside it is written."""

import json
import os
import shutil
import stat
import sys

import pytest
from fault_table import fault
from helpers import run_command
from in_process import alone, at_once
from one_rank import fresh
from program import LIMIT, block_of, environment, metrics, mpipar, one_block
from simulated_ranks import workers_of
from state_cases import config_for, savers_of

from mpipar.errors import DataError, OutputError
from mpipar.run import folder as run_folder
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps
from mpipar.run.checkpoint.tokenizer_files import write_tokenizer_files
from mpipar.run.console.output import GrowingFile, Log, write_text
from mpipar.run.files import bounded, replace
from mpipar.run.process import lock
from mpipar.run.trace import trace_file

KINDS = {  # what stands in the place of a file: plant it at a path
    "a link": lambda path, outside: path.symlink_to(outside),
    "a dangling link": lambda path, outside: path.symlink_to(path.parent.parent / "nowhere"),
    "a hard link": lambda path, outside: os.link(outside, path),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
}

WRITERS = {
    "trace": lambda run: trace_file.write_meta(run, {}),
    "weights": lambda run: checkpoint.save(fresh(), run / "weights"),
    "hang": lambda run: replace.replace_file("hang/rank-00000.json", [b"{}"], root=run),
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


@fault(52, "a planted link, pipe or folder in place of a file of the run", 74)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [run_folder.LOG, run_folder.METRICS, run_folder.EVALUATIONS])
def test_a_growing_file_is_a_regular_file_of_the_run(kind, name, victim):
    run, outside, _ = victim
    KINDS[kind](run / name, outside)
    with (
        at_once(),
        pytest.raises(OutputError, match=f"{name}: can't be written: {name} is a link, or"),
    ):
        GrowingFile(run, name)
    assert not (run.parent / "nowhere").exists()


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
        replace.replace_file("report.html", [b"new"], root=run)
    assert (run / "report.html").read_bytes() == b"new"
    assert stat.S_ISREG((run / "report.html").lstat().st_mode)
    assert [path.name for path in run.iterdir()] == ["report.html"]


@fault(52, "a planted link in place of a folder of the run", 74)
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
    outside_json = run.parent / "result.json"
    outside_json.write_text('{"step": 7}')
    (run / "result.json").symlink_to(outside_json)
    assert run_folder.finished_step(run) == 0
    with pytest.raises(DataError, match="is a link"):
        bounded.read_json("result.json", root=run)
    (run / "checkpoints").symlink_to(folder)
    with pytest.raises(DataError, match="is a link"):
        committed_steps(run / "checkpoints")


@fault(51, "a run folder from another user, whose log.txt leads to a file of the user", 74)
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


DAMAGED = (b'{"stgp": 2, "loss": 0.5}', b'{"step": 2, "loss": \xff}', b"[" * 200_000, b"[2]")


@fault(53, "damaged lines of metrics.jsonl are removed, and the run continues", 0)
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


@pytest.mark.parametrize("how", ["removed", "moved", "replaced by a link", "replaced by a copy"])
def test_a_file_that_lost_its_name_is_written_anew(how, victim):
    run, outside, _ = victim
    file = GrowingFile(run, "metrics.jsonl")
    file.write("one\n")
    assert file.sync() == ""
    path = run / "metrics.jsonl"
    path.unlink() if how == "removed" else path.rename(run / "elsewhere")
    if how == "replaced by a link":
        path.symlink_to(outside)
    elif how == "replaced by a copy":
        shutil.copy(run / "elsewhere", path)
    file.write("two\n")
    assert "written again" in file.sync()
    file.write("three\n")
    assert file.sync() == ""
    file.close()
    assert path.read_text() == "one\ntwo\nthree\n"
    assert stat.S_ISREG(path.lstat().st_mode)
    assert not list(run.glob("*.partial"))


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


@fault(54, "the run folder is moved while a run continues: reported, and written again", 0)
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


@fault(55, "another job has the run folder's name while a run continues", 74)
def test_a_folder_that_another_job_has_taken_is_not_written(tmp_path, text_folder):
    result = changed_in_step_3(
        "os.rename('run', 'old'); os.mkdir('run'); open('run/lock', 'w').write('x')", tmp_path
    )
    block_of(result, 74, "has the folder now")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@fault(56, "checkpoints/ is replaced by a link while a run continues", 74)
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
    for name in ("step-00000001", "step-00000009.partial-1", ".trash-1", "my.partial-1"):
        (inside / name).mkdir(exist_ok=True)
        (inside / name / "notes.txt").write_text(CONTENT)
    for name in (".trash-2", "step-00000008.partial-2", "step-00000002"):
        (inside / name).symlink_to(folder)
    saver.save(2)
    saver.finish()
    assert committed_steps(inside) == [(2, inside / "step-00000002")]
    notes = [path.parent for path in inside.glob("*/notes.txt") if not path.parent.is_symlink()]
    assert sorted(path.name.rpartition("-")[0] for path in notes) == [
        ".trash",
        ".trash-step-00000001",
        ".trash-step-00000009.partial-1",
        "my.partial",
    ]
    assert all([*path.iterdir()] == [path / "notes.txt"] for path in notes)


# --- the lock


@fault(57, "a lock that is a link, a pipe or a folder", 74)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a hard link"])
def test_a_lock_that_is_no_file_is_refused(kind, victim):
    run, outside, _ = victim
    KINDS[kind](run / lock.NAME, outside)
    with at_once(), pytest.raises(OSError, match="lock is a link, or") as refused:
        lock.acquire(run, "token")
    with pytest.raises(OutputError), run_folder.said(run, "no"):
        raise refused.value


# --- outputs


@fault(60, "an output in a folder that is missing", 74)
def test_a_picture_in_a_missing_folder_cannot_be_written(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"):
        write_text(tmp_path / "none" / "picture.svg", "")


def test_no_foreign_text_is_a_line_of_the_log(tmp_path):
    file = GrowingFile(tmp_path, "log.txt")
    Log(0, file)("a\rb\u2028c\x85d")
    assert (tmp_path / "log.txt").read_text() == "a\\rb\\u2028c\\x85d\n"
