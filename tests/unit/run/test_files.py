"""Files from outside: each hostile or broken one ends with one sentence, immediately."""

import json
import os
import tomllib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import at_once, printed

from mpipar.config.model import ModelConfig
from mpipar.errors import DataError, UsageError
from mpipar.run.console.tables import describe_model
from mpipar.run.files import bounded
from mpipar.run.files.text import counted, harmless, printable, shown

MANY = 400_000


JSON = {
    "nothing": ("", "is not JSON"),
    "depth": ("[" * MANY, "more than 32 deep"),
    "depth that Python reads": ("[" * 40 + "]" * 40, "more than 32 deep"),
    "objects in objects": ('{"a":' * MANY, "more than 32 deep"),
    "5,000 digits": (f'{{"a": {"9" * 5000}}}', "is not JSON: .*digits"),
    "30 digits": (f'{{"a": [-{"9" * 30}]}}', "64 bits cannot hold"),
    "NaN": ('{"a": [NaN]}', "not a finite number"),
    "more than float64": ("1e999", "not a finite number"),
    "a zero byte": ('["\\u0000"]', "zero byte"),
    "a zero byte in a name": ('{"a\\u0000": 1}', "zero byte"),
    "half a character": ('["\\ud800"]', "half a character"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
    "a key twice among many": (json.dumps({f"k{i}": 1 for i in range(90_000)})[:-1] + ',"k9":1}',
                               "the key 'k9' twice"),
}  # fmt: skip
TOML = {
    "no value": ("x" * MANY, "is not TOML"),
    "depth": ("a = " + "[" * MANY, "more than 32 deep"),
    "tables in tables": ("a = " + "{b = " * 40 + "1" + "}" * 40, "more than 32 deep"),
    "5,000 digits": ("layers = " + "9" * 5000, "is not TOML: .*digits"),
    "hexadecimal digits": ("layers = 0x" + "f" * 5000, "64 bits"),
    "a zero byte": ('out = "run\\u0000"', "zero byte"),
    "a key twice": ("a = 1\na = 2", "Cannot overwrite a value"),
    "texts without end": ('a = "' + '\\"' * MANY + "\\", "is not TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON)
def test_json_that_is_hostile_or_broken(case, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(JSON[case][0])
    with at_once(), pytest.raises(DataError, match=rf"a\.json: .*{JSON[case][1]}.*; cure$"):
        bounded.read_json(path, cure="cure", most_bytes=1 << 22)


@pytest.mark.parametrize("case", TOML)
def test_toml_that_is_hostile_or_broken(case, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(TOML[case][0])
    with at_once(), pytest.raises(UsageError, match=f"^--config a: .*{TOML[case][1]}"):
        bounded.read_toml(path, UsageError, where="--config a")


def test_a_file_that_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path, part in [
        (tmp_path / "pipe", "a pipe or a device; give a regular file"),
        (tmp_path / "folder", "is a folder, a pipe"),
        ("/dev/zero", "or a device"),
        (tmp_path / "none", "No such file"),
        ("a\0b", "zero byte"),
    ]:
        with at_once(), pytest.raises(DataError, match=part):
            bounded.read_json(path)


def test_size_and_encoding_of_a_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DataError, match="is not UTF-8 text: byte 7"):
        bounded.read_json(path)
    os.truncate(path, 1 << 40)  # a hole: nothing is stored, and nothing may be allocated
    with at_once(), pytest.raises(DataError, match=r"has 1,099,511,627,776 bytes; the limit is"):
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


@given(VALUES, st.data())
def test_damaged_json_is_read_or_refused(value, data):
    text = list(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.text('[]{}",:\\u0d8e9-.NI\x00', max_size=3)
        )
    text = "".join(text)
    with suppress(ValueError):
        assert bounded.parse_json(text) == json.loads(text)


@given(st.text("a.b\"'[]{}=#,\\\n 1e_-x:TZ", max_size=60))
def test_any_toml_is_read_or_refused(text):
    with suppress(ValueError):
        assert bounded.parse_toml(text) == tomllib.loads(text)


def test_text_that_a_terminal_would_obey_is_spelled_out():
    assert harmless("a\x1b[31mb\rc\x9bd\u202ee\nf\tg") == "a\\x1b[31mb\\rc\\x9bd\\u202ee\nf\tg"
    assert printable("\x07\u20ac") == "\\x07\u20ac"
    assert shown("\x1b" + "x" * 1000, 10) == "'\\x1bxxxxx..."
    assert shown(["a"]) == "['a']"


def test_one_of_a_thing_has_no_plural():
    assert [counted(count, "microbatch") for count in (0, 1, 2)] == [
        "0 microbatches",
        "1 microbatch",
        "2 microbatches",
    ]
    assert [counted(count, "traced row") for count in (1, 4)] == ["1 traced row", "4 traced rows"]
    one = ModelConfig(layers=1, heads=1)
    assert describe_model(one).startswith("1 layer, D 128, 1 head, F 512")
    text = printed("explain", "--num-microbatches", 1, "--batch-size", 1)
    assert "one step of 1f1b, 1 microbatch of 1 row, float32\n" in text
