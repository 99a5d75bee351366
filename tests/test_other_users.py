"""Files of another user, and folders without permission: the right words, and no traceback."""

import os
import stat

import pytest
from fault_table import fault
from hostile_folder import NOBODY, WRITERS, as_nobody
from one_rank import fresh
from state_cases import config_for, saved

from mpipar.checkpoint import weights as checkpoint
from mpipar.checkpoint.manifest import committed_steps
from mpipar.commands import run_folder
from mpipar.commands.source import find_source
from mpipar.console.output import GrowingFile
from mpipar.errors import OutputError
from mpipar.job import lock


@pytest.fixture
def theirs(tmp_path):
    """A run folder of an unprivileged user, to which that user can come."""
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        os.chmod(folder, folder.stat().st_mode | stat.S_IXOTH)
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, NOBODY, NOBODY)
    return run


@fault(58, "a file of the run that belongs to another user", 74)
@pytest.mark.parametrize("name", ["log.txt", "checkpoints", "weights"])
def test_what_belongs_to_another_user_is_not_written(name, theirs):
    path = theirs / name
    if name == "log.txt":
        path.write_text("")
        path.chmod(0o666)
    else:
        path.mkdir()
        path.chmod(0o777)
    said = as_nobody(run_folder.check_own, theirs)
    assert said.startswith("OutputError")
    assert f"{name} belongs to another user (id 0, yours is {NOBODY})" in said
    run_folder.check_own(theirs)  # root may
    os.chown(path, NOBODY, NOBODY)
    assert as_nobody(run_folder.check_own, theirs) == "None"
    assert [one.name for one in theirs.iterdir()] == [name]


def test_a_disk_that_shows_all_files_as_one_users_is_written(theirs):
    """Some disks of other hosts do this, so the run folder belongs to that user, too."""
    os.chown(theirs, 0, 0)
    theirs.chmod(0o777)
    (theirs / "log.txt").write_text("")
    (theirs / "log.txt").chmod(0o666)
    assert as_nobody(run_folder.check_own, theirs) == "None"


def everything(run):
    """All that a run writes, as the commands would report it."""
    found = {}
    for name, write in {
        "log": lambda run: GrowingFile(run, "log.txt"),
        "result": lambda run: run_folder.write_result(run, {}),
        **WRITERS,
    }.items():
        try:
            write(run)
        except (OutputError, PermissionError) as error:
            found[name] = "Permission denied" in str(error)
    return found


@fault(59, "a run folder that this user may not write", 74)
@pytest.mark.parametrize("mode", [0o000, 0o500], ids=["none", "read only"])
def test_a_folder_without_permission_is_said(mode, theirs):
    """In mid-run, too: each writer says it, and none fails with anything else."""
    theirs.chmod(mode)
    said = as_nobody(everything, theirs)
    assert said == repr(dict.fromkeys(["log", "result", *WRITERS], True))
    said = as_nobody(lock.acquire, theirs, "token")
    assert said.startswith("PermissionError")
    assert "Permission denied" in said


def test_a_file_loses_its_permission_while_a_run_goes_on(theirs):
    def run():
        file = GrowingFile(theirs, "log.txt")
        file.write("one\n")
        theirs.chmod(0o500)
        (theirs / "log.txt").chmod(0o000)
        file.write("two\n")
        note = file.sync()
        file.close()
        return note, file.warned

    assert as_nobody(run) == "('', False)"
    assert (theirs / "log.txt").read_text() == "one\ntwo\n"


def test_what_belongs_to_others_can_be_read(theirs):
    checkpoint.save(fresh(), theirs / "weights")
    step = saved(config_for(), 1, theirs / "checkpoints")
    for path in theirs.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert as_nobody(find_source, str(theirs), "RUN") == repr(str(theirs / "weights"))
    assert as_nobody(lambda: committed_steps(theirs / "checkpoints")[0][1] == step) == "True"


def test_weights_that_cannot_be_listed_are_said(theirs):
    checkpoint.save(fresh(), theirs / "weights")
    (theirs / "weights").chmod(0o700)
    said = as_nobody(find_source, str(theirs), "RUN")
    assert said == f"DataError: {theirs / 'weights'}: Permission denied"
