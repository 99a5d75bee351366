"""The flat buffers of a stage: their order, their runs and units, and the state of an optimizer."""

import numpy as np
import pytest
from config_helpers import changed

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.ops import make
from mpipar.train.worker import Worker

SHAPE = {
    "layers": 3,
    "d_model": 6,
    "heads": 2,
    "ffn": 11,
    "seq_len": 5,
    "vocab_size": 13,
    "num_microbatches": 2,
    "batch_size": 8,
}
LAYOUTS = {
    "one rank": {},
    "data": {"dp": 4},
    "tied": {"pp": 2},
    "untied": {"pp": 2, "tied": False},
    "tokens cut": {"tp": 2, "sequence_parallel": True},
}


def worker_of(**values):
    """The Worker of world rank 0, without MPI."""
    values = SHAPE | {"dp": 1, "pp": 1, "tp": 1} | values
    config, _ = resolve(changed(**values), values["dp"] * values["pp"] * values["tp"])
    recorder = Recorder()
    return Worker(config, Grid.of(config.grid, 0), make("shapes", "float32", recorder), recorder)


def places(flat):
    """(param, slice) of every parameter, in the order of the buffers."""
    start = 0
    for param in flat.params:
        yield param, slice(start, start + param.size)
        start += param.size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_has_a_buffer_for_each_set_of_groups(layout):
    for stage in worker_of(**LAYOUTS[layout]).stages.values():
        groups = [flat.groups for flat in stage.flats]
        assert len(groups) == len(set(groups))
        assert list(map(len, groups)) == sorted(map(len, groups))
        for flat in stage.flats:
            assert {param.grad_groups for param in flat.params} == {flat.groups}
        unit_of = {
            param.name: unit
            for unit, layers in reversed([*enumerate(stage.units)])
            for layer in layers
            for param in layer.params
        }
        assert {param.name: param.unit for param in stage.params}.items() <= unit_of.items()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_ordered_by_units_then_decay(layout):
    for flat in worker_of(**LAYOUTS[layout]).flats:
        keys = [(-param.unit, not param.decay) for param in flat.params]
        assert keys == sorted(keys)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_and_units_cover_each_parameter_once(layout):
    for flat in worker_of(**LAYOUTS[layout]).flats:
        for runs in (
            list(flat.units.values()),
            [run for _, run in flat.decay_runs[0]],
            [run for *_, run in flat.norm_runs],
        ):
            assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
            assert runs[-1].stop == flat.size == sum(param.size for param in flat.params)
        for param, place in places(flat):
            run = flat.units[param.unit]
            assert run.start <= place.start
            assert place.stop <= run.stop
            assert [param.owner] == [
                counts
                for counts, _, run in flat.norm_runs
                if run.start <= place.start and place.stop <= run.stop
            ]


SHARED = {
    "data": {"dp": 4},
    "both": {"dp": 2, "cp": 2, "seq_len": 8},
    "tied": {"dp": 2, "pp": 2},
    "tokens cut": {"dp": 3, "tp": 2, "sequence_parallel": True, "batch_size": 12},
}


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("layout", SHARED)
def test_every_data_rank_owns_an_equal_share(layout, level):
    """Together the ranks own each number once, in pieces of equal length."""
    values = SHARED[layout] | {"zero": level, "bucket_bytes": 100}
    count = values["dp"] * values.get("cp", 1)
    axes = {"pp": values.get("pp", 1), "tp": values.get("tp", 1)}
    config, _ = resolve(changed(**SHAPE | values | axes), count * axes["pp"] * axes["tp"])
    ranks = []
    for rank in Grid.of(config.grid, 0).group("dp", "cp"):
        worker = Worker(
            config, Grid.of(config.grid, rank), make("shapes", "float32", Recorder()), Recorder()
        )
        ranks.append(worker.flats)
    for flats in zip(*ranks, strict=True):
        assert_shared_out(flats, count)
        longest = max(run.stop - run.start for _, run in flats[0].segments)
        assert level == 3 or longest <= 25  # 100 bytes
        assert level == 1 or len(flats[0].segments) == len(flats[0].units)
    lengths = [length for flat in ranks[0] for length in flat.lengths]
    assert level == 1 or max(lengths) > 25


def assert_shared_out(flats, count):
    """The same buffers on all ranks of a data group: each number has one owner."""
    covered = np.zeros(flats[0].total, int)
    for flat in flats:
        for own in flat.local_slices:
            covered[own] += 1
        assert [(own.stop - own.start) * count for own in flat.local_slices] == [
            segment.run.stop - segment.run.start for segment in flat.segments
        ]
    assert (covered == 1).all()
    assert (
        sum(
            part.size
            for flat in flats
            for param in flat.params
            for _, part in flat.parts(param, flat.reduced_grads)
        )
        == flats[0].size
    )


def test_an_update_is_two_runs_for_each_unit():
    flat = worker_of().flats[0]
    assert len(flat.units) == SHAPE["layers"] + 2
    # The embedding has no parameters without decay: it has one run, and norm and head have
    # the norm alone, because the table is the embedding's.
    assert len(flat.decay_runs[0]) == 2 * SHAPE["layers"] + 2


@pytest.mark.parametrize(
    ("optimizer", "kinds"), [("sgd", ["master"]), ("adamw", ["master", "m", "v"])]
)
def test_state_names_all_that_an_update_changes(optimizer, kinds):
    """Two steps give the same bits as one step, a new worker with its state, and another step."""
    config, _ = resolve(changed(**SHAPE, dp=1, pp=1, tp=1, dtype="float64", optimizer=optimizer), 1)
    rng = np.random.default_rng(0)

    def fresh():
        worker = Worker(config, Grid(0), make("cpu", "float64"), Recorder())
        worker.initialize()
        return worker

    first, second = fresh(), fresh()
    gradients = rng.standard_normal((2, first.flats[0].grad.size))
    for step, gradient in enumerate(gradients, 1):
        first.flats[0].grad[...] = gradient
        first.optimizer.step(0.1, step)
        if step == 1:
            state, other = first.flats[0].state, second.flats[0].state
            assert list(state) == list(other) == kinds
            for kind, buffer in other.items():
                buffer[...] = state[kind]
    second.flats[0].copy_master_to_params()
    second.flats[0].grad[...] = gradients[1]
    second.optimizer.step(0.1, 2)
    np.testing.assert_array_equal(first.flats[0].master, second.flats[0].master)
