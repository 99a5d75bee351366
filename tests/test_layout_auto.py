"""--layout auto: which layouts there are, which one is chosen, and what stays unchanged."""

from dataclasses import replace

import pytest
from in_process import assert_refused, printed, refusal
from machine_models import config_of, machine

from mpipar.commands.auto import legal_layouts
from mpipar.commands.elsewhere import resumed
from mpipar.config.reading import ParsedConfig, over
from mpipar.config.sections import Config, build
from mpipar.errors import UsageError
from mpipar.plan import choose_layout
from mpipar.plan.choose_layout import choose
from mpipar.plan.machine import Passes
from mpipar.plan.measure_machine import one_blocks
from mpipar.plan.step import step_estimate

LAYOUTS = [{"dp": 4}, {"pp": 4}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}]


def known(**passes):
    """The cost model with blocks of tp 1, 2 and 4; passes: seconds of a forward by tp."""
    base = machine()
    units = base.units[0]
    return replace(
        base,
        units=tuple(
            replace(units, tp=tp, block=Passes(seconds, seconds, seconds))
            for tp, seconds in zip(
                (1, 2, 4), passes.get("seconds", (1e-3, 8e-4, 7e-4)), strict=True
            )
        ),
    )


def configs(limit=None, num_microbatches=4):
    """The same 16 rows on four ranks, in several layouts."""
    found = []
    for axes in LAYOUTS:
        rows = 16 // num_microbatches // axes.get("dp", 1)
        one = config_of(num_microbatches=num_microbatches, rows=rows, **axes)
        found.append(replace(one, run=replace(one.run, memory_limit=limit)))
    return found


@pytest.mark.parametrize("seconds", [(1e-3, 8e-4, 7e-4), (1e-3, 3e-4, 2e-4), (1e-2, 1e-2, 1e-4)])
def test_the_choice_is_that_of_brute_force(seconds):
    model = known(seconds=seconds)
    every = {str(one.grid): step_estimate(model, one).total for one in configs()}
    best, notes = choose(configs(), model)
    assert every[str(best.grid)] <= 1.03 * min(every.values())
    assert notes[0].startswith("--layout auto: ")
    assert all(len(line) < 200 for line in notes[1].splitlines())


def test_a_bound_above_the_step_would_lose_the_best_layout(monkeypatch):
    """The broken twin: passes that seem to take longer than the whole step are never judged."""
    best, _ = choose(configs(), known())
    true = choose_layout.scheduled

    def longer(config, model):
        one = true(config, model)
        return one._replace(seconds=10.0) if one.config.grid == best.grid else one

    monkeypatch.setattr(choose_layout, "scheduled", longer)
    assert choose(configs(), known())[0].grid != best.grid


def test_what_does_not_fit_is_not_chosen_and_says_why():
    free = {str(one.grid): step_estimate(known(), one).peak_bytes for one in configs()}
    limit = min(free.values())
    best, notes = choose(configs(limit), known())
    assert free[str(best.grid)] == limit
    assert "its fullest rank needs" in notes[1]
    with pytest.raises(UsageError) as caught:
        choose(configs(1000), known())
    assert len(caught.value.problems) == len(LAYOUTS)


def test_what_the_cost_model_lacks_is_not_chosen():
    best, notes = choose(configs(), machine())  # it has passes of tp 1 alone
    assert best.grid.tp == 1
    assert "tp 1 (not 4)" in notes[1]


def axes_of(readings):
    return {(one.config.grid.dp, one.config.grid.pp, one.config.grid.tp) for one in readings}


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
    assert legal_layouts(alone, ranks) == [alone]


def test_one_block_is_measured_for_each_number_of_rows_and_of_tp_ranks():
    found = [
        (one.train.batch_size // one.grid.dp, one.grid.tp, one.model.layers, one.grid.dp)
        for one in one_blocks(configs(), 4)
    ]
    assert found == [
        (1, 1, 1, 4),
        (1, 2, 1, 2),
        (1, 4, 1, 1),
        (2, 1, 1, 4),
        (2, 2, 1, 2),
        (4, 1, 1, 4),
        (4, 4, 1, 1),
    ]


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
    assert "# --layout auto: training measures and chooses" in text
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
        ["--machine machine.json with", "--layout auto"],
        "train",
        "--machine",
        "machine.json",
        ranks=2,
    )


def test_a_cost_model_is_read_even_where_one_layout_is_left(tmp_path):
    assert_refused(
        65, ["none.json"], "train", "--layout", "auto", "--machine", "none.json", folder=tmp_path
    )
