"""What a barrier makes of an array, and that a backward barrier is the transpose of its forward.

A gradient is cut where its array is, and whole where its array was partial. Where an array was
whole, it depends. If each rank used it for its own part, the gradient is partial. If all did the
same with it, the gradient is whole.
tests/equal/layers/test_turns.py holds the words to numbers.
"""

from dataclasses import replace

import pytest
from test_explain import configure

from mpipar.comm.record import TURNS, turns
from mpipar.config.memory import MemoryConfig
from mpipar.study.explain.layer_costs import CONTEXT, CUTS
from mpipar.study.explain.predict import predict

GRADIENT = {"cut": "cut", "partial": "whole", "whole": "partial"}


def is_transpose(forward: list[str], backward: list[str]) -> bool:
    """Return whether collectives of F and I at one place are each other's transposes.

    One alone needs no other if it ends in a whole array that all ranks use in the same way. The way
    back leaves everything out but the own piece, and sends nothing.
    """
    if not (forward and backward):
        return all(TURNS[one][1] == "whole" for one in forward + backward)
    return [TURNS[one] for one in backward] == [
        (GRADIENT[TURNS[one][1]], GRADIENT[TURNS[one][0]]) for one in reversed(forward)
    ]


def at(barriers, side):
    """The kinds of the barriers of F and of I that carry this side of a product."""
    return tuple(
        [kind for phase, kind, place in barriers if (phase, place) == (wanted, side)]
        for wanted in "FI"
    )


@pytest.mark.parametrize("side", "xy")
@pytest.mark.parametrize("name", [name for name in CUTS if not name.endswith("_ring")])
def test_backward_of_a_cut_is_the_transpose_of_forward(name, side):
    assert is_transpose(*at(CUTS[name].barriers, side))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (["all_reduce"], ["all_gather"]),
        (["all_gather"], ["all_gather"]),
        (["reduce_scatter"], []),
        ([], ["reduce_scatter"]),
    ],
)
def test_what_is_no_transpose_is_found(forward, backward):
    assert not is_transpose(forward, backward)


def test_exchanges_over_cp_are_transposes():
    again, *back = [kind for phase, kind, *_ in CONTEXT["gather"] if phase == "I"]
    assert again == "all_gather"  # keys and values that forward did not keep, once more
    assert is_transpose(["all_gather"], back)
    forward, backward = (
        [kind for phase, kind, *_ in CONTEXT["ulysses"] if phase == wanted] for wanted in "FI"
    )
    assert is_transpose(forward, backward)


def operations(prediction, phases, part):
    """{(operation, peer)} of the records with this part of a name in some phases."""
    return {
        (one.operation, one.peer)
        for one in prediction.recorder.records
        if part in one.name and one.phase in phases
    }


def test_weights_and_messages_are_transposes_too():
    """ZeRO-3 gathers weights and scatters gradients; a pipeline sends back where it received."""
    config = configure((2, 2, 1), "1f1b", "pair")
    config = replace(config, memory=MemoryConfig(zero=3))
    prediction = predict(config, 0)
    ((gather, _),) = operations(prediction, "F", "block0.gather")
    ((scatter, _),) = operations(prediction, ("sync",), "block0.scatter")
    assert is_transpose([gather], [scatter])
    assert operations(prediction, "F", "activations") == {("send", 1)}
    assert operations(prediction, "I", "gradients") == {("recv", 1)}
    assert {turns("send"), turns("recv")} == {"moved"}
