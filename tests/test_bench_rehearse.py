"""bench.rehearse without ranks: who plays what, how long computing takes, and what is refused."""

import pytest

from bench.rehearse import __main__ as rehearse
from bench.rehearse.pace import at_rate, spread
from bench.rehearse.player import lay_out, room_needed
from bench.rehearse.script import CALL, WAIT, script_of
from bench.training import config_of
from mpipar.errors import OutputError, UsageError
from mpipar.study.explain.predict import predict

SMALL = "--layers 2 --num-microbatches 2 --batch-size 24"
LAYOUTS = {
    "hybrid": f"--preset tiny --layout dp=2,pp=2,tp=2 {SMALL}",
    "experts": f"--preset moe-tiny --layout dp=4,ep=2 {SMALL} --zero 3",
}


def parsed(*words):
    return rehearse.main.parse([*words])


def test_two_rehearsals_take_turns_over_the_ranks():
    """Both lie on all hosts; the larger one has the ranks that are left."""
    args = parsed("tiny", "--layout", "dp=4", "--beside", "tiny --layout tp=2")
    first, second = rehearse.jobs_of(args, 6)
    assert (first.ranks, second.ranks) == ((0, 2, 4, 5), (1, 3))
    (alone,) = rehearse.jobs_of(parsed("tiny", "--layout", "dp=2"), 2)
    assert alone.ranks == (0, 1)


@pytest.mark.parametrize(
    ("words", "ranks", "text"),
    [
        (["tiny", "--layout", "dp=4"], 2, "start mpiexec -n 4"),
        (["tiny"], 1, "two ranks or more"),
        (["tiny", "--layout", "dp=2", "--beside", "tiny --layout tp=2"], 2, "mpiexec -n 4"),
        (["tiny", "--layout", "dp=2", "--beside", "tiny'"], 4, "No closing quotation"),
        (["tiny", "--layout", "dp=2", "--beside", "--layout dp=2"], 4, "first word is a preset"),
        (["tiny", "--layout", "dp=2", "--nonsense"], 2, "unknown flag"),
        (["tiny", "--layout", "dp=2", "--preset", "gpt2"], 2, "first word is the preset"),
        (["tiny", "--layout", "dp=2", "--preset=tiny"], 2, "--preset=tiny: .* leave it out"),
        (["nobody", "--layout", "dp=2"], 2, "must be one of tiny"),
    ],
)
def test_what_cannot_be_played_is_refused(words, ranks, text):
    with pytest.raises(UsageError, match=text):
        rehearse.jobs_of(parsed(*words), ranks)


@pytest.mark.parametrize(("layout", "ranks"), [("dp=2", 2), ("dp=4", 1)])
def test_first_ranks_are_fewer_than_all(layout, ranks):
    with pytest.raises(UsageError, match="give a larger layout"):
        rehearse.jobs_of(parsed("tiny", "--layout", layout, "--first-ranks"), ranks)
    (job,) = rehearse.jobs_of(parsed("tiny", "--layout", "dp=4", "--first-ranks"), 3)
    assert job.ranks == (0, 1, 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--first-ranks", "--trace", "t"], "leave one of them out"),
        (["--first-ranks", "--beside", "tiny --layout dp=2"], "leave one of them out"),
        (["--compute", "1"], "add --gflops"),
        (["--gflops", "1"], "add --compute 1"),
        (["--compute", "some", "--gflops", "1"], "--compute"),
        (["--compute", "1", "--gflops", "-1"], "--gflops"),
        (["--trace", "t", "--beside", "tiny --layout dp=2"], "give one of them"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(words, text):
    with pytest.raises(UsageError, match=text):
        parsed("tiny", "--layout", "dp=2", *words)


def test_a_folder_with_a_trace_is_refused(tmp_path):
    (tmp_path / "trace").mkdir()
    with pytest.raises(OutputError, match="has a trace"):
        rehearse.make_folder(str(tmp_path))


def test_payloads_that_find_no_room_are_refused(monkeypatch):
    config = config_of(["--layout", "dp=2"])
    monkeypatch.setattr(rehearse, "memory_left", lambda: 1 << 20)
    with pytest.raises(UsageError, match="take more ranks or a smaller model"):
        rehearse.check_room(script_of(config, 0), 2)


def test_arrays_are_shared_by_calls_that_are_not_under_way_together():
    """No array belongs to two calls at once, and tensor-parallel sums need one between them."""
    script = script_of(config_of(["--layout", "pp=2,tp=2"]), 0)
    forms, chosen = lay_out(script)
    held = set()
    for event in script.events:
        if event.action == CALL:
            call = script.calls[event.number]
            assert chosen[event.number] not in held
            assert forms[chosen[event.number]].shape == call.shape
            held |= {chosen[event.number]} if call.posted else set()
        elif event.action == WAIT:
            held.remove(chosen[event.number])
    assert not held
    assert len(forms) < len(script.calls) / 3
    assert room_needed(script) < sum(call.record.payload_bytes for call in script.calls) / 2


def test_computing_lies_where_its_flops_are():
    config = config_of(["--layout", "pp=2"])
    script = script_of(config, 0)
    found = at_rate(script, 2.0, 3.0)
    assert sum(found) == pytest.approx(
        2 * sum(event.flops for event in script.events) / 3e9, rel=1e-12
    )
    assert at_rate(script, 0.0, None) is None
    seconds = {("F", 0): 0.5, ("B", 0): 1.5, ("opt", -1): 0.25}
    assert sum(spread(script, seconds)) == pytest.approx(4 * 0.5 + 4 * 1.5 + 0.25, rel=1e-12)


@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_a_script_is_what_a_step_on_shapes_does(name):
    """Its calls are the records, its FLOPs those of the step, and each posted call is waited for
    once, after its begin.
    """
    config = config_of(LAYOUTS[name].split())
    script, prediction = script_of(config, 1), predict(config, 1)
    assert [call.record[3:] for call in script.calls] == [
        record[3:] for record in prediction.recorder.records
    ]
    assert sum(event.flops for event in script.events) == sum(prediction.flops.values())
    begun = [event.number for event in script.events if event.action == CALL]
    assert begun == list(range(len(script.calls)))
    waited = [event.number for event in script.events if event.action == WAIT]
    assert sorted(waited) == [number for number in begun if script.calls[number].posted]
    places = {
        event.number: place for place, event in enumerate(script.events) if event.action == CALL
    }
    assert all(
        places[event.number] < place
        for place, event in enumerate(script.events)
        if event.action == WAIT
    )
