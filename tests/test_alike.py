"""The table of what differs between the ranks of a job."""

from mpipar.job import alike


def test_the_table_names_field_ranks_and_values():
    facts = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1", "b": "x"}]
    assert [line.split() for line in alike.differences(facts)] == [
        ["field", "ranks", "value"], ["a", "0,2", "1"], ["a", "1", "2"]]


def test_a_field_that_a_rank_lacks_is_left_out_unless_it_is_refused():
    lines = alike.differences([{"a": "1", "b": "x"}, {"refused": "--y: unknown flag"}])
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["refused", "0", "nothing"], ["refused", "1", "--y: unknown flag"]]


def test_values_are_harmless_and_short():
    lines = alike.differences([{"a": "\x1b[31m"}, {"a": "y" * 1000}])
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) < 100


def test_one_byte_of_the_source_changes_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(alike, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("x = 1\n")
    before = alike.source_digest()
    (tmp_path / "one.py").write_text("x = 2\n")
    assert alike.source_digest() != before
