"""What a block keeps, and what layers declare: barriers, FLOPs and bytes of the step on shapes."""

import itertools
from collections import Counter

import pytest
from test_explain import LLAMA, RING, configure

from mpipar.comm.record import STATE_CHANGES, family, state_change
from mpipar.config.train import MemoryConfig
from mpipar.study.explain import formulas
from mpipar.study.explain.layer_costs import CONTEXT, CUTS, KINDS, value
from mpipar.study.explain.predict import predict, unit_memory

# --- what a block keeps, by its closed forms


def assert_block_forms(config):
    """What a block keeps of a microbatch, as the layers on shapes count it."""
    memory, forms = unit_memory(config), formulas.kept_by_block(config)
    for field, (text, size) in zip(("stash_bytes", "kept_bytes"), forms.values(), strict=True):
        assert memory[field][1:3] == (size, size), (field, text)


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    [
        ("none", "float64"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(["none", "attention", "block"], ["float64", "bfloat16"])
            if case != ("none", "float64")
        ),
    ],
)
@pytest.mark.parametrize(
    ("tp", "cp", "method", "settings", "run"),
    [
        (1, 1, None, {}, {}),
        (2, 1, None, {"sequence_parallel": True}, {}),
        (4, 1, None, RING, {}),
        (2, 2, "ring", {}, {}),
        (1, 2, "gather", LLAMA, {}),
        (1, 2, "ulysses", LLAMA, {}),
        (4, 1, None, LLAMA, {}),
        (1, 2, "ulysses", {}, {"device": "cuda"}),
        (2, 1, None, {}, {"device": "cuda"}),
    ],
    ids=str,
)
def test_what_a_block_keeps_follows_its_closed_form(
    tp, cp, method, settings, run, recompute, dtype
):
    if run and dtype == "float64":
        dtype = "float32"  # no fused kernel computes in float64
    assert_block_forms(
        configure(
            (1, 1, 1),
            memory=MemoryConfig(recompute),
            layers=2,
            seq_len=12,
            **{"tp": tp, "cp": cp, "cp_attention": method, "dtype": dtype} | run | settings,
        )
    )


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("ffn_cut", ["pair", "gather", "reduce"])
def test_what_a_block_of_other_cuts_keeps_follows_its_closed_form(ffn_cut, norm, recompute):
    for dtype in ("float64", "bfloat16"):
        assert_block_forms(
            configure(
                (1, 1, 2),
                memory=MemoryConfig(recompute),
                ffn_cut=ffn_cut,
                dtype=dtype,
                layers=2,
                norm=norm,
            )
        )


# --- the barriers, FLOPs and bytes that layers declare are those that the step on shapes counts


EVERY_LAYER = [
    ((1, 1, 1), 1, {}, "none"),
    ((1, 1, 4), 1, {"ffn_cut": "gather"}, "none"),
    ((1, 1, 2), 1, {"ffn_cut": "reduce"}, "block"),
    ((1, 1, 2), 1, {"sequence_parallel": True}, "attention"),
    ((1, 1, 4), 1, RING, "block"),
    ((1, 1, 2), 2, LLAMA | {"sequence_parallel": True}, "none"),
    ((1, 1, 4), 1, LLAMA, "block"),
]


def of_every_layer(layout, cp, settings, recompute):
    whole = {"cp": cp, "cp_attention": "ring" if cp > 1 else None, "dtype": "bfloat16"}
    memory = MemoryConfig(recompute)
    return configure(layout, memory=memory, seq_len=24, **whole | settings)


@pytest.mark.parametrize(("layout", "cp", "settings", "recompute"), EVERY_LAYER, ids=str)
def test_layers_say_every_barrier_of_the_passes(layout, cp, settings, recompute):
    """Name, operation, phase, calls and bytes of a microbatch, of each unit of one stage."""
    config = of_every_layer(layout, cp, settings, recompute)
    units, sizes = formulas.units_of(config)
    count = config.model.layers
    said, found, prediction = Counter(), Counter(), predict(config, 0)
    for times, cost in ((1, units.entry), (count, units.block), (1, units.head)):
        for barrier in cost.barriers:
            q = len(prediction.groups[barrier.axis])
            phases = [barrier.phase] + ["recompute"] * (barrier.again and recompute == "block")
            for phase, operation in itertools.product(
                phases, KINDS[barrier.kind].operations if q > 1 else ()
            ):
                calls = barrier.calls(q) // len(KINDS[barrier.kind].operations)
                said[barrier.axis, barrier.name, operation, phase, barrier.payload(sizes, q)] += (
                    times * calls
                )
    for record in prediction.recorder.records:
        if record.mb == 1 and record.axis in ("tp", "cp", "kv"):
            found[
                record.axis,
                family(record.name),
                record.operation,
                record.phase,
                record.payload_bytes,
            ] += 1
    assert said == found
    assert bool(found) == (layout != (1, 1, 1))


@pytest.mark.parametrize(("layout", "cp", "settings", "recompute"), EVERY_LAYER, ids=str)
def test_layers_say_what_the_first_and_the_last_unit_keep(layout, cp, settings, recompute):
    config = of_every_layer(layout, cp, settings, recompute)
    (entry, _, head, stream), sizes = formulas.units_of(config)
    memory = unit_memory(config)
    # There a unit's result belongs to it, here its input does.
    for place, cost, moved in ((0, entry, 1), (-1, head, -1)):
        assert memory["stash_bytes"][place] == (
            value(cost.stash, sizes) + moved * value(stream, sizes)
        )
        assert memory["kept_bytes"][place] == value(cost.kept, sizes)


@pytest.mark.parametrize(("layout", "cp", "settings", "recompute"), EVERY_LAYER, ids=str)
def test_layers_say_the_flops_of_their_products(layout, cp, settings, recompute):
    """A ring attends to half of what other ranks hold."""
    config = of_every_layer(layout, cp, settings, recompute)
    units, sizes = formulas.units_of(config)
    times = [(1, units.entry), (config.model.layers, units.block), (1, units.head)]
    flops, attention = (
        sum(count * value(getattr(cost, kind), sizes) for count, cost in times)
        for kind in ("flops", "attention")
    )
    counted = predict(config, 0).flops
    m = config.grid.num_microbatches
    assert counted["W"] == m * (flops - attention)
    assert counted["F"] == m * (flops - attention * (cp - 1) / 2 / cp)


# --- what a barrier makes of an array, and that a backward barrier is the transpose of its forward


GRADIENT = {"cut": "cut", "partial": "whole", "whole": "partial"}


def is_transpose(forward: list[str], backward: list[str]) -> bool:
    """Return whether collectives of F and I at one place are each other's transposes.

    One alone needs no other if it ends in a whole array that all ranks use in the same way. The way
    back leaves everything out but the own piece, and sends nothing.
    """
    if not (forward and backward):
        return all(STATE_CHANGES[one][1] == "whole" for one in forward + backward)
    return [STATE_CHANGES[one] for one in backward] == [
        (GRADIENT[STATE_CHANGES[one][1]], GRADIENT[STATE_CHANGES[one][0]])
        for one in reversed(forward)
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
    config = configure((2, 2, 1), memory=MemoryConfig(zero=3))
    prediction = predict(config, 0)
    ((gather, _),) = operations(prediction, "F", "block0.gather")
    ((scatter, _),) = operations(prediction, ("sync",), "block0.scatter")
    assert is_transpose([gather], [scatter])
    assert operations(prediction, "F", "activations") == {("send", 1)}
    assert operations(prediction, "I", "gradients") == {("recv", 1)}
    assert {state_change("send"), state_change("recv")} == {"moved"}
