"""--layout auto: which layouts there are, which one is chosen, and what stays unchanged."""

from dataclasses import replace

import pytest
from in_process import assert_refused, printed, refusal

from mpipar.config.reading import ParsedConfig, over
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config, build
from mpipar.errors import UsageError
from mpipar.run.resume import resumed
from mpipar.study.explain.predict import fullest
from mpipar.study.plan.auto import best_of, legal_layouts, with_best_layout
from mpipar.study.plan.machine import load_machine
from mpipar.study.plan.of_config import step_of

LAYOUTS = [{"dp": 4}, {"pp": 4}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}]


def axes_of(readings):
    return {(one.config.grid.dp, one.config.grid.pp, one.config.grid.tp) for one, _ in readings}


def configs(limit=None, num_microbatches=4):
    """The same 16 rows on four ranks, in several layouts."""
    found = []
    for axes in LAYOUTS:
        sizes = {"dp": 1, "pp": 1, "tp": 1} | axes
        values = sizes | {"batch_size": 16, "num_microbatches": num_microbatches}
        found.append(resolve(build(values | {"memory_limit": limit}), 4)[0])
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_choice_has_the_shortest_step_of_its_data_sheet(dtype):
    every = [replace(one, run=replace(one.run, dtype=dtype)) for one in configs()]
    steps = [step_of(one, load_machine("cpu")).total for one in every]
    place, note = best_of(every, None)
    assert steps[place] == min(steps)
    assert note.startswith("--layout auto: predicted steps by the data sheet cpu: dp ")
    assert note.count(" ms") == len(every)


def test_another_machine_may_choose_another_layout():
    assert "by the data sheet h100" in best_of(configs(), "h100")[1]
    with pytest.raises(UsageError, match="did you mean h100"):
        best_of(configs(), "h10")


def test_what_does_not_fit_a_limit_is_not_chosen():
    peaks = [fullest(one).peak_total for one in configs()]
    place, note = best_of(configs(min(peaks)), None)
    assert peaks[place] == min(peaks)
    assert note.count(" ms") == peaks.count(min(peaks))
    with pytest.raises(UsageError) as caught:
        best_of(configs(1000), None)
    assert len(caught.value.problems) == len(peaks)
    assert "and --memory-limit is 1000 B" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        ({}, 4, {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)}),
        ({"tp": 2}, 4, {(2, 1, 2), (1, 2, 2)}),
        ({}, 3, {(1, 3, 1)}),  # three copies would need 24 rows, three tp ranks another model
        ({"cp": 2}, 2, {(1, 1, 1)}),
        ({"zero": 1}, 2, {(2, 1, 1)}),
        ({"batch_size": 18, "num_microbatches": 2}, 3, {(3, 1, 1), (1, 3, 1)}),
    ],
)
def test_layouts_are_those_that_these_ranks_can_have(values, ranks, expected):
    reading = ParsedConfig(build(values), given=values, chooses_layout=True)
    assert axes_of(legal_layouts(reading, ranks)) == expected
    alone = replace(reading, chooses_layout=False)
    assert with_best_layout(alone, ranks) is alone


def test_a_run_that_goes_on_keeps_what_was_chosen():
    saved = {"dp": 2, "pp": 1, "cp": 1, "tp": 1, "schedule": "zb-h1", "stage_layers": None}
    reading = ParsedConfig(Config(), chooses_layout=True)
    kept = resumed(reading, saved, 2)
    assert not kept.chooses_layout
    assert kept.config.grid.dp == 2
    assert resumed(reading, saved, 4).chooses_layout
    assert resumed(over({}, replace(reading, given={"tp": 2})), saved, 2).chooses_layout


def test_only_train_chooses(tmp_path):
    for words in (("explain",), ("verify",)):
        assert "--layout auto: only mpipar train accepts it" in str(
            refusal(*words, "--layout", "auto")
        )
    (tmp_path / "job.toml").write_text('layout = "auto"\nlayers = 2\n')
    text = printed("train", "--config", tmp_path / "job.toml", "--print-config")
    assert "# --layout auto: training chooses" in text
    text = printed("train", "--config", tmp_path / "job.toml", "--layout", "dp=1", "--print-config")
    assert "chooses" not in text
    (tmp_path / "axes.toml").write_text('layout = "pp=2"\nlayers = 2\n')
    text = printed(
        "train", "--config", tmp_path / "axes.toml", "--layout", "auto", "--print-config", ranks=1
    )
    assert "pp = 1" in text


def test_a_cost_model_without_a_choice_is_refused():
    assert_refused(
        2,
        ["--machine machine.json: it is for --layout auto"],
        "train",
        "--machine",
        "machine.json",
        ranks=2,
    )
