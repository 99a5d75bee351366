"""A machine from its data sheet: the same Machine as a measured one, built from closed forms."""

import pytest
from in_process import printed, refusal

from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.models import layer_split
from mpipar.plan.cluster import STACKS, load_cluster
from mpipar.plan.data_sheet import layout_of, machine_of
from mpipar.plan.pipeline_time import timeline
from mpipar.plan.shape import Shape
from mpipar.plan.step import step_estimate
from mpipar.plan.step_time import step_time
from mpipar.train.build import configured_schedule

H100 = load_cluster("h100")


def resolved(**settings):
    given = {
        "preset": "gpt2",
        "layers": 8,
        "seq_len": 256,
        "batch_size": 16,
        "dtype": "bfloat16",
        "num_microbatches": 8,
        "device": "cuda",
    } | settings
    config = build(given)
    ranks = config.grid.dp * config.grid.pp * config.grid.cp * config.grid.tp
    return resolve(config, ranks)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 1, "pp": 1, "tp": 1, "num_microbatches": 4},
        {"dp": 1, "pp": 4, "tp": 1},
        {"dp": 1, "pp": 4, "tp": 2, "sequence_parallel": True},
        {"dp": 1, "pp": 4, "tp": 1, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_the_code_on_shapes_takes_what_the_closed_forms_say(layout):
    """The event simulator of real barriers, and closed forms. The code also sums a tied table."""
    config = resolved(**layout)
    machine = machine_of("h100", [config])
    found = step_estimate(machine, config)
    assert not found.extrapolated
    shape, stack = Shape.of(config.model.completed()), STACKS["mpipar"]
    planned = layout_of(config)._replace(schedule=config.grid.schedule)
    counts = layer_split(config, configured_schedule(config.grid))
    expected = step_time(shape, planned, H100, stack, timeline, tuple(counts))
    pipeline = expected.total - expected.sums - expected.update
    assert found.pipeline == pytest.approx(pipeline, rel=0.01)
    assert found.update == pytest.approx(expected.update, rel=0.01)
    assert expected.sums == 0 < found.barriers or config.grid.pp == 1


def test_explain_takes_the_name_of_a_machine():
    words = ("explain", "--preset", "gpt2", "--layout", "dp=2,pp=2", "--summary")
    text = printed(*words, "--machine", "h100")
    assert "predicted step: " in text
    assert "did you mean h100?" in str(refusal(*words, "--machine", "h10"))
    assert "nosuch.json" in str(refusal(*words, "--machine", "nosuch.json"))
    text = str(refusal("explain", "--dtype", "float64", "--machine", "h100"))
    assert "--dtype float64: h100 has no rate" in text
