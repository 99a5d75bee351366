"""The barriers, FLOPs and bytes that layers declare are those that the step on shapes counts."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from test_explain import LLAMA, RING, configure

from mpipar.comm.record import family
from mpipar.config.memory import MemoryConfig
from mpipar.study.explain import formulas
from mpipar.study.explain.layer_costs import KINDS, value
from mpipar.study.explain.predict import predict, unit_memory

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
    config = configure(layout, "1f1b", "pair")
    grid = replace(config.grid, cp=cp, cp_attention="ring" if cp > 1 else None)
    return replace(
        config,
        grid=grid,
        memory=MemoryConfig(recompute),
        run=replace(config.run, dtype="bfloat16"),
        model=replace(config.model, seq_len=24, **settings),
    )


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
