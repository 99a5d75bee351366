"""The Chrome JSON: slices nest on their rows, arrows begin and end inside slices."""

import json

import pytest
from perfetto_rules import check_arrows, check_slices, slices
from planted_delays import Run, Simulator
from trace_cases import blocking, record, span, trace, with_operations

from mpipar.study.trace import perfetto, waits


def example():
    """A barrier at which rank 1 is 30 ms late, messages: waited for, not, and received late."""
    send = {"peer": 1, "tag": 3, "stage": 0}
    receive = {"peer": 0, "tag": 3, "stage": 1}
    return trace(
        [
            [blocking("all_reduce", "block0.ffn.down", "tp", 10, 42),
             record("send", "activations", "pp", 60, 80, 80, **send),
             record("send", "activations", "pp", 60, 81, 81, **send),
             record("send", "gradients", "pp", 70, 82, 85, **send)],
            [blocking("all_reduce", "block0.ffn.down", "tp", 40, 41),
             record("recv", "activations", "pp", 42, 50, 63, **receive),
             record("recv", "activations", "pp", 64, 66, 66, **receive),
             record("recv", "gradients", "pp", 84, 85, 88, **receive)],
        ],
        [[span("F", 0, 45)], [span("F", 2, 44, stage=1)]],
    )  # fmt: skip


@pytest.fixture
def found(tmp_path):
    case = example()
    path = tmp_path / "trace.json"
    count = perfetto.write(case, waits.find(case), path)
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    return events


def test_slices_nest_and_arrows_lead_from_the_late_to_the_waiting(found):
    check_slices(found)
    leads = sorted((start["name"], start["pid"], end["pid"]) for start, end in check_arrows(found))
    assert leads == [
        ("activations", 0, 1),
        ("block0.ffn.down", 1, 0),
        ("gradients", 1, 0),
    ]


def test_arrows_from_the_call_itself_lead_backwards(found):
    """The broken twin begins an arrow in the late rank's transfer, as Perfetto would join it."""
    for event in found:
        if event["ph"] == "s":
            time, mark = (
                event["ts"],
                next(
                    one
                    for one in found
                    if one["ph"] == "X"
                    and one["tid"] == 3
                    and (one["pid"], one["ts"]) == (event["pid"], event["ts"])
                ),
            )
            event["tid"], event["ts"] = 2, time + mark["dur"]
    with pytest.raises(AssertionError):
        check_arrows(found)


@pytest.mark.parametrize("error", [-3_000, 0, 3_000])
def test_no_arrow_leads_backwards_on_clocks_that_differ(error):
    made = Simulator(Run((("dp", 2), ("pp", 2)), fault="data", delay=20.0)).trace
    rank = made.ranks[1]
    rank.records = [
        one._replace(
            posted_ns=one.posted_ns + error,
            waited_ns=one.waited_ns + error,
            done_ns=one.done_ns + error,
        )
        for one in rank.records
    ]
    calls = waits.find(made)
    found = perfetto.events(made, calls)
    check_slices([event for event in found if event.get("cat") != "compute"])
    late = [call for own in calls.calls for call in own if call.wait_ns and call.transfer_ns]
    assert len(check_arrows(found)) == len(late) > 40


def test_an_arrow_outside_its_slice_and_slices_that_cross_are_noticed(found):
    arrow = next(event for event in found if event["ph"] == "f")
    arrow["ts"] += 50_000
    with pytest.raises(AssertionError):
        check_arrows(found)
    wait = next(event for event in found if event["ph"] == "X" and event["cat"] == "wait")
    with pytest.raises(AssertionError):
        check_slices([wait, wait | {"ts": wait["ts"] + wait["dur"] / 2}])


def test_operations_of_layers_lie_inside_their_passes():
    case = with_operations(example())
    found = perfetto.events(case, waits.find(case))
    check_slices(found)
    (start, end, name), *operations = slices(found)[1, 0]
    assert name == "1F0"
    assert [name for *_, name in operations] == [
        f"block{part}.ffn.down matmul" for part in range(3)
    ]
    assert (operations[0][0], operations[-1][1]) == (start, end) == (2_000, 44_000)
    operation = next(event for event in found if event["name"].startswith("block2."))
    assert operation["args"] == {"phase": "F", "step": 1, "stage": 0, "mb": 0}
