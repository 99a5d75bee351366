"""A rehearsal makes the calls of a training step: its records equal those of a real one."""

from operator import attrgetter

import numpy as np
import pytest
from small_model import (
    EVEN,
    EXPERTS,
    LAYOUTS,
    WORLD,
    called,
    cut_model,
    plant,
    real_step,
    slow_unless,
    small_config,
)

from bench.rehearse import Player, script_of
from mpipar import ops as ops_module
from mpipar.comm.group import Comm
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.recorder import as_record
from mpipar.study.examples.catalog import EXAMPLES, TOLERANCE, run

WHAT = attrgetter(
    "operation",
    "name",
    "axis",
    "peer",
    "tag",
    "payload_bytes",
    "wire_bytes",
    "dtype",
    "stage",
    "mb",
    "phase",
)
PIPELINE = {2: (1, 2, 1), 4: (2, 2, 1)}.get(WORLD.size, (1, 1, 1))
TENSOR = {2: (1, 1, 2), 4: (2, 1, 2)}.get(WORLD.size, (1, 1, 1))
SHARED = {2: (2, 1, 1), 4: (2, 2, 1)}.get(WORLD.size, (1, 1, 1))
DATA = {2: (2, 1, 1), 4: (4, 1, 1)}.get(WORLD.size, (1, 1, 1))
CONTEXT = {2: (1, 1, 1), 4: (1, 1, 2)}.get(WORLD.size, (1, 1, 1))


RING = {"cp": 2, "cp_attention": "ring"}
CASES = {  # name: arguments of small_config
    **{f"1f1b {layout}": {"layout": layout} for layout in LAYOUTS.get(WORLD.size, ())},
    "zb-h1": {"layout": PIPELINE, "num_microbatches": 4, "schedule": "zb-h1"},
    "dualpipe-v": {"layout": PIPELINE, "num_microbatches": 4, "schedule": "dualpipe-v"},
    "ring": {"layout": TENSOR, "model": cut_model("ring")},
    "context": {"layout": CONTEXT, "model": EVEN, **RING},
    "experts": {"layout": DATA, "model": EXPERTS, "ep": 2},
    "experts, cp": {
        "layout": CONTEXT,
        "model": EXPERTS,
        "ep": 2,
        "cp": 2,
    },
    "zero 3": {"layout": SHARED, "zero": 3},
    "bfloat16": {"layout": TENSOR, "dtype": "bfloat16"},
    "window": {"layout": DATA, "all_reduce": "window"},
}


def player_of(config) -> Player:
    ops = ops_module.make_for(config.run)
    return Player(config, WORLD, ops, script_of(config, WORLD.rank))


IN_SHORT = {2: ("zb-h1", "experts", "zero 3"), 4: ()}.get(WORLD.size, ())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "case",
    slow_unless(
        lambda case: case in (*IN_SHORT, f"1f1b {LAYOUTS[WORLD.size][-1]}"),
        [(case,) for case in CASES],
    ),
)
def test_records_are_those_of_a_real_step(case):
    """Only what experts send depends on numbers, if tokens choose them."""
    config = small_config(**CASES[case])
    player = player_of(config)
    assert player.check() == ""
    player.play()
    played = list(map(as_record, player.recorder.entries))
    _, recorder = real_step(config)
    player.comms.close()
    assert played

    def known(record):
        chosen = record.operation == "all_to_allv"
        return WHAT(record._replace(payload_bytes=0, wire_bytes=0) if chosen else record)

    assert list(map(known, played)) == list(map(known, recorder.records))


def wrong_on_some_rank(config) -> bool:
    player = player_of(config)
    found = np.array([len(player.check())])
    player.comms.close()
    WORLD.Allreduce(found.copy(), found)
    return bool(found[0])


def sum_that_lacks_a_part(plain, wire, x, op):
    if wire.mpi.rank == 0:
        x.fill(0)
    plain(wire, x, op)


def exchanged_messages(plain, comm, x, peer, tag, name):
    """All activations of two microbatches have one form; each brings the number of its tag."""
    return plain(comm, x, peer, tag ^ 2 if name == "activations" else tag, name)


def parts_of_the_wrong_ranks(plain, wire, x, size):
    return np.ascontiguousarray(plain(wire, x, size)[::-1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "name", "twin", "values"),
    [
        (MpiTransport, "all_reduce", sum_that_lacks_a_part, {"layout": TENSOR}),
        (Comm, "isend", exchanged_messages, {"layout": PIPELINE, "schedule": "gpipe"}),
        (
            MpiTransport,
            "all_gather",
            parts_of_the_wrong_ranks,
            {"layout": TENSOR, "sequence_parallel": True},
        ),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(owner, name, twin, values, monkeypatch):
    plant(monkeypatch, owner, name, twin)
    assert wrong_on_some_rank(small_config(**values))


# --- worked examples equal one rank, on real ranks


HERE = [name for name, one in EXAMPLES.items() if WORLD.size in one.ranks]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", HERE)
def test_an_example_equals_one_rank(name):
    lines, off = run(name, WORLD)
    assert off <= TOLERANCE
    assert bool(lines) == (WORLD.rank == 0)
    if lines:
        assert lines[0].startswith(f"{name}: ")
        assert sum("barrier" in line or "gets" in line for line in lines) > 0
