"""Configuration: legal values, chosen values, flags and TOML, and the messages about all others."""

import dataclasses
import itertools
import json
import math
import tomllib

import pytest
from config_helpers import changed, reading_of
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config.grid import matching
from mpipar.config.names import CONSTANT, EXAMPLES, REMOVED
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import config_problems, resolve
from mpipar.config.sections import CHOICES, FIELDS, FLAGS, SECTIONS, Config, settings
from mpipar.config.setting import flag, kind, read_bytes
from mpipar.errors import DataError, EnvironmentProblem, UsageError
from mpipar.run.files.settings import to_toml, values_of


def usage_problems(config, world_size):
    with pytest.raises(UsageError) as caught:
        resolve(config, world_size)
    return caught.value.problems


# --- the fields themselves


def test_a_name_means_the_same_in_every_section():
    """Keys form one flat space: sections share no name."""
    assert sum(len(dataclasses.fields(part)) for part in SECTIONS.values()) == len(FIELDS)
    for choice, *values in CHOICES.values():
        legal = FIELDS[choice].metadata["choices"]
        assert set(values) < set(legal) if values else FIELDS[choice].default is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("world_size", [1, 6, 8])
def test_every_preset_resolves_for_every_number_of_ranks(preset, world_size):
    config, _ = resolve(reading_of("--preset", preset).config, world_size)
    grid = config.grid
    assert grid.dp * grid.pp * grid.cp * grid.tp == world_size
    assert config.train.batch_size % (grid.dp * grid.num_microbatches) == 0
    assert config.model.ffn == (PRESETS[preset].get("ffn") or 4 * config.model.d_model)
    assert resolve(config, world_size) == (config, [])


# --- the layout


@pytest.mark.parametrize(
    ("values", "world_size", "layout"),
    [
        *(
            ({}, dp * pp * tp, (dp, pp, tp))
            for dp, pp, tp in (
                (1, 1, 1),
                (1, 2, 1),
                (3, 1, 1),
                (1, 2, 2),
                (5, 1, 1),
                (3, 2, 1),
                (7, 1, 1),
                (2, 2, 2),
                (3, 2, 2),
                (4, 2, 2),
            )
        ),
        ({"dp": 4}, 4, (4, 1, 1)),
        ({"pp": 4}, 4, (1, 4, 1)),
        ({"tp": 4}, 4, (1, 1, 4)),
        ({"tp": 1}, 4, (2, 2, 1)),
        ({"pp": 1}, 4, (2, 1, 2)),
        ({"dp": 1}, 6, (1, 3, 2)),
        ({"pp": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"tp": 2}, 8, (2, 2, 2)),
        ({"heads": 3, "d_model": 96}, 4, (2, 2, 1)),  # what cannot be cut is not
        ({"heads": 3, "d_model": 96, "layers": 1}, 4, (4, 1, 1)),
    ],
)
def test_layout_for_a_number_of_ranks(values, world_size, layout):
    """Axes that are given stay."""
    grid = resolve(changed(**values), world_size)[0].grid
    assert (grid.dp, grid.pp, grid.tp) == layout


@given(
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(0, 8),
    st.tuples(*[st.none() | st.integers(1, 6)] * 3),
)
def test_layouts_match_all_that_is_given(world_size, layers, heads, axes):
    assert sorted(matching(axes, world_size, layers, heads, heads)) == [
        (dp, pp, tp)
        for dp, pp, tp in itertools.product(range(1, world_size + 1), repeat=3)
        if dp * pp * tp == world_size and heads % tp == 0 and pp <= layers
        if all(axis in (None, size) for axis, size in zip(axes, (dp, pp, tp), strict=True))
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", math.nan), ("lr", -1.0), ("lr", 0.0), ("lr", math.inf), ("eps", 0.0),
        ("eps", 1e-46),  # 0 in float32
        ("beta1", 1.0), ("beta2", -0.1), ("clip", -1.0), ("weight_decay", math.nan),
        ("layers", 0), ("heads", -1), ("steps", -1), ("seed", -1), ("seed", 2**63),
        ("num_microbatches", 0), ("stage_layers", (3, 0)), ("batch_size", 0), ("vocab_size", 1),
        ("device", "gpu"), ("dtype", "float8"), ("optimizer", "adam"), ("ffn_cut", "row"),
        ("lr_schedule", "cosin"), ("all_reduce", "MPI"),
        ("d_model", 10**18), ("out", "\udcff"), ("log_interval", 0),
        ("preset", "tny"), ("loss_scale", 0.0), ("loss_scale", math.inf),
        ("loss_scale", 2.0**127), ("memory_limit", 0), ("memory_limit", 2**63),
    ],
)  # fmt: skip
def test_value_out_of_range_is_refused(name, value):
    choice = {"dtype": "float16"} if name.startswith("loss_scale") else {}
    found = config_problems(changed(**choice | {name: value}))
    assert len(found) == 1, found
    assert found[0].startswith("--" + name.replace("_", "-")), found


def test_checks_of_other_floors_are_collected_and_usage_decides_the_code():
    checks = [(lambda _: ["no GPU"], EnvironmentProblem), (lambda _: ["no data"], DataError)]
    with pytest.raises(DataError) as caught:
        resolve(Config(), 1, checks)
    assert caught.value.problems == ["no data", "no GPU"]
    with pytest.raises(UsageError) as caught:
        resolve(changed(lr=-1.0), 1, checks)
    assert caught.value.problems[1:] == ["no data", "no GPU"]
    assert caught.value.exit_code == 2


# --- flags and files


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('preset = "gpt2"\nlayers = 3\nseq-len = 5\nd_model = 24\n')
    config = reading_of("--config", str(file), "--seq-len", "7").config
    assert (config.model.layers, config.model.seq_len, config.model.heads) == (3, 7, 12)
    assert (config.model.d_model, config.run.preset) == (24, "gpt2")
    assert reading_of("--config", str(file), "--preset", "tiny").config.model.heads == 4


SAMPLES = {int: 3, float: 0.25, bool: True, str: "tiny"}


def sample(field):
    """(a value of a field that is not its default, the words that set it)."""
    base, is_tuple = kind(field)
    want = field.metadata["choices"][-1] if field.metadata["choices"] else SAMPLES[base]
    want = not field.default if base is bool else (want, want) if is_tuple else want
    name = "--" + field.name.replace("_", "-")
    if base is bool:
        return want, [name if want else "--no-" + name[2:]]
    if is_tuple:
        return want, [name, *want] if base is str else [name, ",".join(map(str, want))]
    return want, [name, str(want)]


def chosen(name):
    """The words for the choice that a field belongs to; the choice's field and value."""
    if name not in CHOICES:
        return [], None, None
    choice, *values = CHOICES[name]
    value = (*values, EXAMPLES.get(choice))[0]
    return [*chosen(choice)[0], flag(choice), str(value)], choice, value


@pytest.mark.parametrize("name", FLAGS)
def test_every_field_is_read_from_flag_and_file(tmp_path, name):
    """Whatever a field holds, its flag and its TOML key set it to the same value."""
    want, words = sample(FIELDS[name])
    from_flag = reading_of(*chosen(name)[0], *words)
    assert from_flag.problems == ()
    read = {f.name: v for _, f, v in settings(from_flag.config)}
    assert read[name] == want
    assert type(read[name]) is type(want)
    file = tmp_path / f"{name}.toml"
    file.write_text(to_toml(from_flag.config))
    assert reading_of("--config", str(file)).config == from_flag.config


# --- fields of a choice that is not taken


def others(name):
    """The words for another value of the choice that a field belongs to."""
    choice, *values = CHOICES[name]
    if not values:
        return []
    other = next(one for one in FIELDS[choice].metadata["choices"] if one not in values)
    return [*chosen(choice)[0], flag(choice), str(other)]


@pytest.mark.parametrize("name", [name for name in CHOICES if name in FLAGS])
def test_a_field_of_a_choice_that_is_not_taken_is_refused(name):
    words = sample(FIELDS[name])[1]
    _, choice, value = chosen(name)
    (problem,) = reading_of(*others(name), *words).problems
    shown, choice = flag(name), flag(choice)
    whose = " ".join([choice, *filter(None, [" or ".join(map(str, CHOICES[name][1:]))])])
    assert problem.startswith(f"{shown}: belongs to {whose}, but {choice} is ")
    assert problem.endswith(f"; leave it out, or type {choice} {value}")


def test_nothing_is_judged_by_a_value_that_is_none():
    found = config_problems(changed(ffn_cut="both", sequence_parallel=True))
    assert [text.split(":")[0] for text in found] == ["--ffn-cut 'both'"]
    assert reading_of("--positions", "rop", "--rope-theta", "3").problems == ()
    reading = reading_of("--heads", "x", "--d-model", "33")
    assert (reading.bad, set(reading.given)) == ({"heads"}, {"d_model"})


def test_a_configuration_is_written_with_the_fields_in_force_only():
    written = tomllib.loads(to_toml(resolve(reading_of().config, 1)[0]))
    names = {key.replace("-", "_") for key in written}
    found = {CHOICES[name] for name in names & CHOICES.keys()}
    assert found == {CHOICES[name] for name in ("beta1", "eps", "bucket_bytes", "min_lr_ratio")}
    assert names >= {"layers", "d_model", "heads", "seq_len", "norm_eps", "tied", "dp", "steps"}


TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")  # no flag can hold others


@given(
    st.text(TEXT, min_size=1),
    st.floats(1e-300, 1e300),
    st.integers(0, 2**63 - 1),
    st.lists(st.text(TEXT, min_size=1)),
)
def test_toml_there_and_back(tmp_path_factory, out, lr, seed, data):
    config = changed(out=out, lr=lr, seed=seed, data=tuple(data))
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    reading = reading_of("--config", str(file))
    assert reading.problems == ()
    assert reading.config == config


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
        (["--learning-rate", "3"], ["--learning-rate: is called --lr here; type that"]),
        (["--epochs=2"], ["--epochs: unknown flag; type --steps"]),
        (["--gpus", "2"], ["--gpus: unknown flag; type mpiexec -n GPUS", "--ranks"]),
        (["--gpu"], ["--gpu: unknown flag; type --device cuda"]),
        (["--micro-batch-size", "4"], ["--micro-batch-size: unknown", "type --num-microbatches"]),
        (
            ["--gradient-accumulation-steps", "4"],
            [
                "type --num-microbatches, with the same number",
                "--batch-size is the batch of the whole step",
            ],
        ),
        (["--dropout", "0.1"], ["--dropout: unknown flag; type nothing: leave it out"]),
        (["--seqlen=3"], ["--seqlen: unknown flag", "did you mean --seq-len?"]),
        (["--zzzzzzzz"], ["--zzzzzzzz: unknown flag"]),
        (["--layers", "2.5"], ["--layers 2.5", "whole number"]),
        (["--lr", "fast"], ["--lr fast", "must be a number"]),
        (["--out="], ["--out '': must not be empty"]),
        (["--data", "a", ""], ["--data", "must not be empty", "as in text.txt"]),
        (["--config="], ["No such file"]),
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


# --- what is gone


@pytest.mark.parametrize(
    "name", [name for name in REMOVED if name[2:].replace("-", "_") not in FLAGS]
)
def test_a_flag_that_is_gone_says_what_to_do_instead(name):
    (problem,) = reading_of(f"{name}=1").problems
    assert problem == f"{name}: is gone; {REMOVED[name]}"


@pytest.mark.parametrize("name", CONSTANT)
def test_a_key_that_is_gone_may_have_the_value_of_today(name, tmp_path):
    """That of a run's config.toml as well: test_resume.py."""
    key, value, path = name.replace("_", "-"), CONSTANT[name], tmp_path / "old.toml"
    path.write_text("" if value is None else f"{key} = {json.dumps(value)}\n")
    reading, note = reading_of("--config", str(path)), f"{key} is no longer a setting, and left out"
    assert reading.problems == ()
    assert reading.notes == (() if value is None else (f"--config {path}: {note}",))
    path.write_text(f"{key} = 17\n")
    (problem,) = reading_of("--config", str(path)).problems
    assert f"{key} = 17 is no longer possible" in problem


@pytest.mark.parametrize(("old", "new"), [("none", "yes"), ("stage", "no")])
def test_a_renamed_setting_keeps_its_old_name_for_one_release(old, new, tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(f'zero = 3\nzero-keep = "{old}"\n')
    for words in (["--zero", "3", "--zero-keep", old], ["--config", str(path)]):
        reading = reading_of(*words)
        assert reading.problems == ()
        assert reading.config.memory.reshard_after_forward == new
    assert values_of(path.read_text())["reshard_after_forward"] == new


def test_a_key_of_a_model_has_no_flag_but_a_file_sets_it(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text('arch = "llama"\nhead-dim = 6\nrope-scaling = [8, 1, 4, 8192]\n')
    model = reading_of("--config", str(path)).config.model
    assert (model.head_dim, model.rope_scaling) == (6, (8.0, 1.0, 4.0, 8192.0))
    path.write_text("head-dim = 0\n")
    assert config_problems(reading_of("--config", str(path)).config) == [
        "head-dim 0: must be at least 1"
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rat = 1", ["learning_rat: unknown key", "did you mean --lr?"]),
        ("batch-size = 4\nbatch_size = 8", ["batch_size: given twice"]),
        ("[model]\nlayers = 3", ["model: unknown key", "top level"]),
        ('layers = "3"', ["--layers", "'3'", "whole number"]),
        ("layers = true", ["--layers", "whole number"]),
        ("tied = 1", ["--tied", "true or false"]),
        ("out = 3", ["--out", "must be text"]),
        ("stage-layers = 3", ["--stage-layers", "must be a list", "3,2,2,1"]),
        ("stage-layers = []", ["--stage-layers", "not empty", "3,2,2,1"]),
        ("stage-layers = [3, true]", ["--stage-layers", "whole number"]),
        ("steps =\n", ["is not TOML", "line 1"]),
        (f"lr = 1{'0' * 400}", ["may not have the value"]),
        ("layers = 2e9", ["--layers = 2000000000.0", "whole number"]),
        (f"layers = {'9' * 5000}", ["is not TOML", "digits"]),
    ],
)
def test_file_that_cannot_be_read(tmp_path, text, parts):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    found = reading_of("--config", str(file)).problems
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found


# --- bytes as people type them, in every flag and key that takes bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        (" 4k", 4096),
        ("64KiB", 65536),
        ("1.5M", 3 << 19),
        ("1g", 1 << 30),
        ("2TB", 2 << 40),
        ("0", 0),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text, expected):
    assert read_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "K", "4Q", "x", "-1", "1.5", "1.5B", "1e6", "4 K", "\u0664K", "4i", "1..5M"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"^must be bytes: write 4096, 64K, 1\.5M or 1G$"):
        read_bytes(text)


def test_flags_and_keys_take_sizes(tmp_path):
    file = tmp_path / "sizes.toml"
    file.write_text('memory-limit = "1.5M"\n')
    found = reading_of("--config", str(file), "--bucket-bytes", "1.5M")
    assert found.problems == ()
    assert (found.config.train.bucket_bytes, found.config.run.memory_limit) == (3 << 19, 3 << 19)
    assert "memory-limit = 1572864\n" in to_toml(found.config)
    (problem,) = reading_of("--bucket-bytes", "1.5").problems
    assert problem.startswith("--bucket-bytes 1.5: must be bytes")
