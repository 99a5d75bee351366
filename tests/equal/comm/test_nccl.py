"""Training over NCCL, played by fake_nccl: each step equals MPI's and one rank's.

As on a GPU, a call waits there for those before it on its stream and for its peers. What arrives is
NaN until its event has been seen.
"""

from itertools import product

import fake_nccl
import numpy as np
import pytest
from fake_cupy import put_in_nccl
from small_model import (
    DP,
    EVEN,
    PP,
    TP,
    WORLD,
    comms_of,
    cut_model,
    plant,
    slow_unless,
    small_config,
    worker_and_rows,
)

from mpipar import ops as ops_module
from mpipar.comm import nccl
from mpipar.comm.device import StagedTransport
from mpipar.run.verify import SPREAD, differences, full_tensors

HERE, RANKS = WORLD.rank, WORLD.size
pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(autouse=True)
def a_gpu_each(monkeypatch):
    """Every rank has a GPU of its own, and NCCL."""
    put_in_nccl(monkeypatch)


def group(dtype="float64", reach=1):
    """The group of all ranks, with the groups that must be closed."""
    comms = comms_of(ops_module.make("cuda", dtype), reach=reach)
    return comms.world, comms


def trained(config, steps=2):
    """(losses, gradients by name on rank 0, carriers) of steps on the device. Comm: theirs."""
    before = set(fake_nccl.OPEN)
    worker, rows = worker_and_rows(
        config, spread=SPREAD, ops=ops_module.make("cuda", config.run.dtype, kernels="plain")
    )
    losses = [
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb)).loss
        for step in range(1, steps + 1)
    ]
    found = losses, full_tensors(worker, "data"), worker.comms.carriers
    worker.close()
    assert before == fake_nccl.OPEN, "a group's communicator is still open"
    return found


def by_mpi(monkeypatch, config):
    with monkeypatch.context() as patch:
        patch.setenv("MPIPAR_NCCL", "no")
        return trained(config)


def same(expected, found):
    """Whether two runs have the same numbers. Comm: a broadcast."""
    ok = expected[0] == pytest.approx(found[0], rel=1e-12) and all(
        one.ok for one in (differences("weight", found[1], expected[1]) if HERE == 0 else ())
    )
    return WORLD.bcast(bool(ok))


RING = {"model": cut_model("ring")}
SHARED = {"zero": 3}
CP_RING, CP_ULYSSES = ({"model": EVEN, "cp": 2, "cp_attention": one} for one in ("ring", "ulysses"))
CASES = {  # {name: arguments of small_config}
    "dp": (DP, {}),
    "tp": (TP, {}),
    "tp ring": (TP, RING),
    "1f1b": (PP, {}),
    "zb-v": (PP, {"schedule": "zb-v"}),
    "interleaved": (PP, {"schedule": "interleaved"}),
    "zero 3": (DP, {"zero": 3}),
    "pieces": (DP, SHARED),
    "cp ring": ((1, 1, 1), CP_RING),
    "cp ulysses": ((1, 1, 1), CP_ULYSSES),
    "3 stages": ((1, 3, 1), {"schedule": "zb-h1"}),
    "4 stages": ((1, 4, 1), {"schedule": "zb-h1"}),
    "dp x pp": ((2, 2, 1), {}),
    "pp x tp": ((1, 2, 2), RING),
    "zero 3 x pp": ((2, 2, 1), SHARED),
    "cp x tp": ((1, 1, 2), CP_RING),
}
# The others are for the slow sessions, which take more microbatches of each.
QUICK = ("dp", "1f1b", "3 stages", "zero 3 x pp")
MICROBATCHES = {"dp": 2, "1f1b": 2}
MINE = [
    name for name, (layout, more) in CASES.items() if np.prod(layout) * more.get("cp", 1) == RANKS
]


def config_of(name, dtype="float64"):
    layout, more = CASES[name]
    return small_config(
        layout,
        MICROBATCHES.get(name, 5),
        rows_per_mb=1,
        dtype=dtype,
        check_comm=dtype == "bfloat16",
        **more,
    )


@pytest.mark.parametrize("name", slow_unless(QUICK.__contains__, zip(MINE)))
def test_training_equals_that_over_mpi(name, monkeypatch):
    through_host = []
    expected = by_mpi(monkeypatch, config_of(name))
    plant(
        monkeypatch,
        StagedTransport,
        "isend",
        lambda plain, self, *message: (through_host.append(message[2]), plain(self, *message))[1],
    )
    found = trained(config_of(name))
    assert (expected[2], found[2]) == (["MPI through host memory"], ["NCCL"])
    assert same(expected, found)
    assert set(through_host) <= {0}, "only weights, which are gathered to be saved"


@pytest.mark.slow
@pytest.mark.parametrize("name", MINE[:2])
def test_training_in_16_bits_is_that_over_mpi_to_the_bit(name, monkeypatch):
    config = config_of(name, "bfloat16")
    expected, found = by_mpi(monkeypatch, config), trained(config)
    assert expected[0] == found[0]
    for key, x in (expected[1] or {}).items():
        np.testing.assert_array_equal(found[1][key], x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_call_gives_what_mpi_gives(dtype, monkeypatch):
    def results():
        comm, comms = group(dtype)
        ops, found = comm.transport.ops, []

        def array(*shape):
            values = np.arange(HERE, HERE + np.prod(shape)) % 7
            return ops.asarray(values.reshape(shape).astype(ops.dtype))

        def wide(*shape):
            return ops.asarray(np.arange(HERE, HERE + np.prod(shape), dtype="f4").reshape(shape))

        found += [comm.all_reduce(array(5), "a"), comm.all_gather(array(2, 3), "a")]
        found += [comm.reduce_scatter(array(RANKS, 3), "a"), comm.all_to_all(array(RANKS, 2), "a")]
        found += [comm.broadcast(array(4), RANKS - 1, "a"), comm.all_reduce(wide(3), "a", "max")]
        found += [comm.all_reduce(ops.asarray(np.full(2, HERE - 2, np.int64)), "a", "max")]
        root = comm.reduce(wide(4), RANKS - 1, "a")
        found += [] if root is None else [root]
        comm.barrier("a")
        pending = [
            comm.iall_reduce(wide(6), "a"),
            comm.ireduce_scatter(wide(RANKS, 2), "a"),
            comm.iall_gather(array(RANKS, 2), "a"),
            comm.iall_gather(wide(RANKS, 1), "a"),
        ]
        for peer, tag in product((comm.neighbor(1), comm.neighbor(-1)), (6, 3, 7)):
            pending += [
                comm.isend(array(tag, 2), peer, tag, "a"),
                comm.irecv(array(tag, 2), peer, tag, "a"),
            ]
        waited = [one.wait() for one in reversed(pending)]
        found += [
            x[0] if one.entry and k == len(pending) - 2 else x
            for k, (one, x) in enumerate(zip(reversed(pending), waited, strict=True))
        ]
        if HERE == 0:
            comm.send(array(3), 1, 2, "a")
        elif HERE == 1:
            found.append(comm.recv(array(3), 0, 2, "a"))
        counts = comm.recorder.totals("operation")
        comms.close()
        return [ops.to_host(x) for x in found], {key: sums[:3] for key, sums in counts.items()}

    found = results()
    monkeypatch.setenv("MPIPAR_NCCL", "no")
    expected = results()
    assert found[1] == expected[1], "the record does not tell the carriers apart"
    for x, y in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(x, y)


def exchanged(tags_to_send, tags_to_receive):
    """{tag: what came from the rank before}; every number is a tag."""
    comm, comms = group()
    ops = comm.transport.ops
    pending = {
        tag: comm.irecv(ops.zeros(3), comm.neighbor(-1), tag, "a") for tag in tags_to_receive
    }
    sent = [
        comm.isend(ops.asarray(np.full(3, float(tag))), comm.neighbor(1), tag, "a")
        for tag in tags_to_send
    ]
    found = {tag: ops.to_host(one.wait()).tolist() for tag, one in pending.items()}
    for one in sent:
        one.wait()
    comms.close()
    return found


def test_messages_of_two_kinds_may_be_posted_in_any_order():
    assert exchanged([0, 1, 2, 3], [1, 0, 3, 2]) == {tag: [tag] * 3 for tag in range(4)}


def test_messages_out_of_order_are_taken_for_each_other():
    """Why `check_lanes` looks at schedules: NCCL knows no tags."""
    assert exchanged([0, 2], [2, 0]) == {2: [0.0] * 3, 0: [2.0] * 3}


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_one_lane_for_both_kinds_is_caught(monkeypatch):
    """The broken twin: activations and gradients of a V travel one after the other."""
    config = config_of("zb-v")
    expected = by_mpi(monkeypatch, config)
    for name in ("isend", "irecv"):
        plant(
            monkeypatch,
            nccl.NcclTransport,
            name,
            lambda plain, self, x, peer, tag: plain(self, x, peer, 0),
        )
    assert not same(expected, trained(config, 2))


def test_a_forgotten_event_is_caught(monkeypatch):
    """The broken twin: what arrives is used before it has come."""
    monkeypatch.setattr(nccl.Queued, "Test", lambda self: True)
    comm, comms = group()
    x = comm.all_reduce(comm.transport.ops.asarray(np.ones(4)), "a")
    assert np.isnan(comm.transport.ops.to_host(x)).all()
    fake_nccl.settle()
    comms.close()


@pytest.mark.ranks(2)
def test_a_forgotten_drain_is_caught(monkeypatch):
    """The broken twin: NCCL's stream does not wait for the one that computes."""
    ops = ops_module.make("cuda", "float64")
    monkeypatch.setattr(type(ops), "synchronize", lambda self: None)
    with pytest.raises(AssertionError, match="still being computed"):
        trained(config_of("tp"))


@pytest.mark.parametrize("why", ["shared", "off", "another algorithm", None])
def test_mpi_carries_where_nccl_cannot(why, monkeypatch):
    if why == "off":
        monkeypatch.setenv("MPIPAR_NCCL", "no")
    if why == "shared":
        put_in_nccl(monkeypatch, "one for all")
    comms = comms_of(
        ops_module.make("cuda", "float64"),
        all_reduce="ring" if why == "another algorithm" else "mpi",
    )
    assert type(comms["dp"].transport) is (StagedTransport if why else nccl.NcclTransport)
    comms.close()


def test_every_pair_is_connected_in_one_order():
    assert list(nccl.pairs(2, 1)) == [(0, 1), (1, 0)]
    assert sorted(nccl.pairs(5, 1)) == sorted(
        (one, (one + step) % 5) for one in range(5) for step in (-1, 1)
    )
    assert len(set(nccl.pairs(6, 6))) == 30
    assert list(nccl.pairs(6, 0)) == []
