"""Flags and TOML: what is read, what is refused, and config.toml there and back."""

import pytest
from config_helpers import changed, reading_of
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config.reading import to_toml
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config, settings
from mpipar.config.setting import kind


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('preset = "gpt2"\nlayers = 3\nseq-len = 5\nd_model = 24\n')
    config = reading_of("--config", str(file), "--seq-len", "7").config
    assert (config.model.layers, config.model.seq_len, config.model.heads) == (3, 7, 12)
    assert (config.model.d_model, config.run.preset) == (24, "gpt2")
    assert reading_of("--config", str(file), "--preset", "tiny").config.model.heads == 4


def test_every_field_is_read_from_flag_and_file(tmp_path):
    """Whatever a field holds, its flag and its TOML key set it to the same value."""
    samples = {int: 3, float: 0.25, bool: True, str: "tiny"}
    for _, field, value in settings(Config()):
        base, is_tuple = kind(field)
        want = field.metadata["choices"][-1] if field.metadata["choices"] else samples[base]
        want = not value if base is bool else (want, want) if is_tuple else want
        name = "--" + field.name.replace("_", "-")
        if base is bool:
            words = [name if want else "--no-" + name[2:]]
        elif is_tuple:
            words = [name, *want] if base is str else [name, ",".join(map(str, want))]
        else:
            words = [name, str(want)]
        from_flag = reading_of(*words)
        assert from_flag.problems == ()
        read = {f.name: v for _, f, v in settings(from_flag.config)}
        assert read[field.name] == want
        assert type(read[field.name]) is type(want)
        file = tmp_path / f"{field.name}.toml"
        file.write_text(to_toml(from_flag.config))
        assert reading_of("--config", str(file)).config == from_flag.config


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats(1e-300, 1e300),
    st.integers(0, 2**63 - 1),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
)
def test_toml_there_and_back(tmp_path_factory, prompt, lr, seed, data):
    config = changed(prompt=prompt, lr=lr, seed=seed, data=tuple(data))
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    reading = reading_of("--config", str(file))
    assert reading.problems == ()
    assert reading.config == config


def test_resolved_config_there_and_back(tmp_path):
    config, _ = resolve(reading_of("--preset", "gpt2", "--stage-layers", "7,5").config, 4)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert resolve(reading_of("--config", str(file)).config, 4) == (config, [])


def test_layout_is_short_for_the_axes(tmp_path):
    grid = reading_of("--layout", "dp=2, pp=3,tp=4").config.grid
    assert (grid.dp, grid.pp, grid.cp, grid.tp) == (2, 3, 1, 4)
    assert reading_of("--layout", "dp=2", "--dp", "2").problems == ()
    file = tmp_path / "a.toml"
    file.write_text('layout = "dp=2,tp=2"\n')
    grid = reading_of("--config", str(file), "--dp", "3").config.grid
    assert (grid.dp, grid.tp) == (3, 2)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learning-rat", "3"], ["--learning-rat: unknown flag", "did you mean --lr?"]),
        (["--seqlen=3"], ["--seqlen: unknown flag", "did you mean --seq-len?"]),
        (["--zzzzzzzz"], ["--zzzzzzzz: unknown flag"]),
        (["--step", "3"], ["--step: unknown flag", "did you mean --steps?"]),
        (["--layers", "abc"], ["--layers abc", "whole number"]),
        (["--layers", "2.5"], ["--layers 2.5", "whole number"]),
        (["--lr", "fast"], ["--lr fast", "must be a number"]),
        (["--stage-layers", "3,x"], ["--stage-layers 3,x", "3,2,2,1"]),
        (["--layout", "dp=2,xp=3"], ["--layout", "'xp=3'", "dp=2,pp=2,tp=2"]),
        (["--layout", "dp=2,dp=2"], ["--layout", "'dp=2'", "at most once"]),
        (["--layout", "dp=2", "--dp", "3"], ["--layout dp=2", "contradicts --dp 3"]),
        (["--config", "/nonexistent.toml"], ["--config /nonexistent.toml", "No such file"]),
        (["--steps", "3", "loose"], ["'loose'", "unexpected argument"]),
    ],
)
def test_flag_that_cannot_be_read(words, parts):
    found = reading_of(*words).problems
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rate = 1", ["learning_rate: unknown key", "did you mean --lr?"]),
        ("[model]\nlayers = 3", ["model: unknown key", "top level"]),
        ('layers = "3"', ["--layers", "'3'", "whole number"]),
        ("layers = true", ["--layers", "whole number"]),
        ("tied = 1", ["--tied", "true or false"]),
        ("prompt = 3", ["--prompt", "must be text"]),
        ("stage-layers = 3", ["--stage-layers", "must be a list", "[3,2,2,1]"]),
        ("stage-layers = [3, true]", ["--stage-layers", "whole number"]),
        ("seq-len = 3\nseq_len = 3", ["given twice"]),
        ("steps =\n", ["not a TOML file", "line 1"]),
        (f"lr = 1{'0' * 400}", ["--lr", "must be a number"]),
    ],
)
def test_file_that_cannot_be_read(tmp_path, text, parts):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    found = reading_of("--config", str(file)).problems
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


@pytest.mark.parametrize("value", ["-1e-3", "-inf", "-1"])
def test_negative_number_is_a_value_not_a_flag(value):
    assert reading_of("--lr", value, "--steps", "7").config.train.lr == float(value)


def test_what_could_not_be_read_is_not_judged():
    reading = reading_of("--heads", "x", "--d-model", "33")
    assert reading.bad == {"heads"}
    assert reading.given == {"d_model"}
