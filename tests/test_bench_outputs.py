"""A file that cannot be written is refused before anything is measured; looking leaves no trace."""

import sys

import pytest
from helpers import run_ranks

from bench import reading_path, results, schedules, tiles
from bench.claims import __main__ as claims
from bench.kernels import __main__ as kernels
from bench.matmul import __main__ as matmul
from bench.step import __main__ as step
from mpipar.errors import EXIT_OUTPUT, DataError, OutputError


class Session:
    """A job of one rank that can only agree."""

    class world:
        rank, size = 0, 1

    def start(self):
        return self.world

    def agree(self, function):
        return function()


@pytest.fixture
def no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "out.json")


@pytest.mark.parametrize(("bench", "words"), [
    (matmul, []), (schedules, []), (step, []), (reading_path, []), (claims, ["barriers"]),
    (claims, ["hybrids"]), (tiles, []), (kernels, [])],
    ids=lambda one: getattr(one, "__name__", str(one)))
def test_no_bench_measures_what_it_could_not_write(bench, words, no_folder):
    with pytest.raises(OutputError, match=f"--json {no_folder}: Not a directory"):
        bench.main([*words, "--json", no_folder], Session())


def test_several_ranks_end_with_one_message(no_folder):
    done = run_ranks(2, [sys.executable, "-m", "bench.recorder", "--json", no_folder], timeout=60)
    assert done.returncode == EXIT_OUTPUT, done.tail()
    assert done.stderr.count("Not a directory") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["a.json", "more/folders/a.json", "old.json"])
def test_looking_leaves_no_trace(tmp_path, name):
    (tmp_path / "old.json").write_text("as it was")
    results.check_writable(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "as it was"
    results.write(str(tmp_path / name), "bench.none", [])


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", None])
def test_devices_are_files_too(path):
    results.check_writable(path)


@pytest.mark.parametrize(("name", "message"), [
    ("", "is a folder"), ("x" * 300, "File name too long")])
def test_what_cannot_be_a_file_is_refused(tmp_path, name, message):
    with pytest.raises(OutputError, match=message):
        results.check_writable(str(tmp_path / name))


@pytest.mark.parametrize("text", ["not json", "[1]", '{"rows": []}'])
def test_matmul_keeps_a_file_that_is_not_its_own(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(DataError, match="is not a file of bench"):
        matmul.main(["--json", str(path)], Session())
    assert path.read_text() == text
