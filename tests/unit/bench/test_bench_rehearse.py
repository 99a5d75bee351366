"""bench.rehearse without ranks: what is refused, and how arrays are shared."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench import rehearse
from bench.rehearse import CALL, WAIT, configured, lay_out, room_needed, script_of, seconds_of
from bench.training import config_of
from mpipar.errors import UsageError
from mpipar.study.explain.predict import predict
from mpipar.study.plan.machine import load_machine

SMALL = "--layers 2 --num-microbatches 2 --batch-size 24"
LAYOUTS = {
    "hybrid": f"--preset tiny --layout dp=2,pp=2,tp=2 {SMALL}",
    "experts": f"--preset moe-tiny --layout dp=4,ep=2 {SMALL} --zero 3",
}


@pytest.mark.parametrize(
    ("words", "ranks", "text"),
    [
        ("tiny --layout dp=4", 2, "start mpiexec -n 4"),
        ("tiny", 1, "two ranks or more"),
        ("tiny --layout dp=2 --nonsense", 2, "unknown flag"),
        ("nobody --layout dp=2", 2, "must be one of tiny"),
    ],
)
def test_what_cannot_be_played_is_refused(words, ranks, text):
    with pytest.raises(UsageError, match=text):
        configured(rehearse.main.parse(words.split()), ranks)


def test_arrays_are_shared_by_calls_that_are_not_under_way_together():
    script = script_of(config_of(LAYOUTS["hybrid"].split()), 0)
    forms, chosen = lay_out(script)
    busy = set()
    for action, number in script.events:
        call = script.calls[number]
        if action == CALL:
            assert forms[chosen[number]] == (call.record.dtype, call.shape)
            assert chosen[number] not in busy
            busy |= {chosen[number]} if call.posted else set()
        elif action == WAIT:
            busy.remove(chosen[number])
    assert not busy
    assert len(forms) < len(script.calls)
    every = sum(np.dtype(one.record.dtype).itemsize * np.prod(one.shape) for one in script.calls)
    assert room_needed(script) < every


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_script_is_what_a_step_on_shapes_does(name):
    config = config_of(LAYOUTS[name].split())
    for world_rank in (0, 3):
        script = script_of(config, world_rank)
        records = predict(config, world_rank).recorder.records
        own = [(one.record.name, one.record.payload_bytes, one.record.peer) for one in script.calls]
        assert own == [(one.name, one.payload_bytes, one.peer) for one in records]


def test_predicted_times_are_those_of_the_links():
    machine = load_machine("cpu")

    def of(operation, tag=-1):
        record = SimpleNamespace(operation=operation, payload_bytes=1 << 20, tag=tag)
        return seconds_of(machine, record, 4, 1)

    assert of("all_reduce") == machine.all_reduce(1 << 20, 4)
    assert of("reduce_scatter") == machine.all_gather(1 << 20, 4)
    assert of("all_to_allv") == machine.all_to_all(1 << 20, 4)
    assert (of("send", 7), of("recv", 7)) == (0.0, machine.message(1 << 20, 1))
