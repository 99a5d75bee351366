"""Islands that average their weights once in many steps, beside plain training and NumPy."""

import numpy as np
import pytest
from config_helpers import changed
from small_model import (
    EVEN,
    EXPERTS,
    WORLD,
    assert_records_predicted,
    cpu,
    raised_everywhere,
    small_config,
    tokens,
    worker_and_rows,
    worker_of,
)

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.errors import DataError, DriftError, NonFiniteError
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.state import Saver, load_state
from mpipar.run.checks import evaluate, train_step
from mpipar.run.data import rows
from mpipar.run.replicas import Replicas
from mpipar.run.verify import full_tensors
from mpipar.train.outer import Outer
from mpipar.train.worker import Worker

pytestmark = pytest.mark.ranks(2, 4)
PLAIN = {"outer_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
ADAM = {"optimizer": "adamw", "lr": 0.01, "warmup_steps": 2}
STEPS = 7
FACTS = {"config": "", "data": {}}
INSIDE = {  # a layout of two islands on four ranks: its values
    "dp": {"layout": (4, 1, 1)},
    "tp": {"layout": (2, 1, 2)},
    "pp": {"layout": (2, 2, 1), "schedule": "zb-h1"},
    "zero 1": {"layout": (4, 1, 1), "zero": 1},
    "zero 3": {"layout": (4, 1, 1), "zero": 3},
    "cp": {"layout": (2, 1, 1), "cp": 2, "model": EVEN},
    "recompute": {"layout": (2, 1, 2), "recompute": "block"},
    "experts": {"layout": (4, 1, 1), "ep": 2, "model": EXPERTS},
    "order": {"layout": (4, 1, 1), "rank_order": "tp,dp,pp,cp"},
}
LAYOUTS = INSIDE if WORLD.size > 2 else {"alone": {"layout": (2, 1, 1)}}


def layouts(*quick):
    """Parameters of a test; on four ranks all but some are for the slow sessions."""
    return [
        pytest.param(
            values, id=name, marks=[pytest.mark.slow] * (WORLD.size > 2 and name not in quick)
        )
        for name, values in LAYOUTS.items()
    ]


def config_of(layout=(WORLD.size, 1, 1), islands=2, **values):
    return small_config(layout, islands=islands, steps=STEPS, **values)


def trained(config, steps=STEPS):
    """The whole weights after some steps on world rank 0, and the rank's worker."""
    worker, rows = worker_and_rows(config)
    for step in range(1, steps + 1):
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
    return full_tensors(worker, "master"), worker


def distance(found, expected):
    """The largest difference of two models, relative to each tensor's size; the same everywhere."""
    error = max(
        (
            np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()
            for name in found
        ),
        default=0.0,
    )
    return WORLD.bcast(error)


@pytest.mark.parametrize("values", [{}, ADAM], ids=["sgd", "adamw"])
def test_one_island_that_meets_itself_after_each_step_is_plain_training(values):
    plain, _ = trained(config_of(islands=None, **values))
    assert distance(trained(config_of(islands=1, **PLAIN, **values))[0], plain) < 1e-11


@pytest.mark.parametrize("values", layouts("dp", "experts"))
def test_islands_that_meet_after_each_step_of_sgd_are_data_parallel(values):
    plain, _ = trained(config_of(islands=None, clip=0.0, **values))
    assert distance(trained(config_of(clip=0.0, **PLAIN, **values))[0], plain) < 1e-12


def by_numpy(config, interval, lr, momentum):
    """DiLoCo with AdamW, written down again: gradients come from one rank, all else is here."""
    count, train = config.grid.islands, config.train
    alone = changed(
        config,
        dp=1, pp=1, tp=1, cp=1, cp_attention=None, ep=1, islands=None, zero=0, recompute="none",
        schedule="1f1b", batch_size=train.batch_size // count, rank_order="pp,dp,cp,tp",
    )  # fmt: skip
    worker = Worker(alone, Grid(0), cpu(), Recorder())
    worker.initialize()
    wide = changed(config, dp=count, pp=1, tp=1, cp=1, cp_attention=None)
    read = [
        rows.Rows(worker.ops, tokens(), wide, Grid(number, {"island": count}))
        for number in range(count)
    ]
    flats, decay = worker.flats, []
    for flat in flats:
        decay.append(np.zeros(flat.total))
        for decays, run in flat.decay_runs[0]:
            decay[-1][run] = decays * train.weight_decay
    decay = np.concatenate(decay)
    outer = np.concatenate([flat.master for flat in flats])
    velocity = np.zeros_like(outer)
    islands = [(outer.copy(), np.zeros_like(outer), np.zeros_like(outer)) for _ in read]
    for step in range(1, train.steps + 1):
        rate = train.lr * min(1, step / train.warmup_steps)
        for part, (w, m, v) in zip(read, islands, strict=True):
            edges = np.cumsum([flat.total for flat in flats])[:-1]
            for flat, values in zip(flats, np.split(w, edges), strict=True):
                flat.master[...] = values
            worker.gradients(step, lambda mb, part=part, step=step: part.train(step, mb))
            g = np.concatenate([flat.grad for flat in flats])
            norm = np.sqrt((g * g).sum())
            g *= min(1, train.clip / (norm + 1e-6))
            m[...] = train.beta1 * m + (1 - train.beta1) * g
            v[...] = train.beta2 * v + (1 - train.beta2) * g * g
            size = np.sqrt(v / (1 - train.beta2**step)) + train.eps
            w[...] -= rate * (m / (1 - train.beta1**step) / size + decay * w)
        if step % interval == 0 or step == train.steps:
            d = outer - np.mean([w for w, _, _ in islands], axis=0)
            velocity = d + momentum * velocity
            outer = outer - lr * (d + momentum * velocity)
            for w, _, _ in islands:
                w[...] = outer
    for flat, values in zip(flats, np.split(outer, edges), strict=True):
        flat.master[...] = values
    return full_tensors(worker, "master")


def judged(values):
    """The distance of a real run with AdamW and H = 3 from the NumPy program."""
    config = config_of(**ADAM, lr_schedule="constant", outer_interval=3, **values)
    return distance(trained(config)[0], by_numpy(config, 3, 0.7, 0.9))


@pytest.mark.parametrize("values", layouts("tp", "pp", "zero 1", "zero 3"))
def test_weights_are_those_of_an_independent_program(values):
    assert judged(values) < 1e-9


def step_with(fault):
    """An outer step, written down once more, with one fault."""

    def step(self):
        config, islands = self.config, self.comms["island"]
        for flat in self.flats:
            for kinds in zip(*map(flat.pieces, ("master", "outer", "velocity")), strict=True):
                master, outer, v = kinds
                d = islands.all_reduce(outer - master, "outer.delta") / islands.size
                d *= -1 if fault == "sign of d" else 1
                v[...] = d + config.outer_momentum * v
                mixed = d + config.outer_momentum * v
                if fault == "momentum mixed in place":
                    v[...] = mixed
                outer -= config.outer_lr * mixed
                master[...] = outer
            if fault == "moments reset":
                for kind in "mv":
                    flat.moments[kind][...] = 0
        self.begun = False

    return step


@pytest.mark.parametrize(
    "fault", [None, "sign of d", "momentum mixed in place", "moments reset"], ids=str
)
def test_a_twin_is_found(fault, monkeypatch):
    monkeypatch.setattr(Outer, "step", step_with(fault))
    found = judged({"layout": (WORLD.size, 1, 1)})
    assert found > 1e-3 if fault else found < 1e-9


def test_islands_call_each_other_in_the_step_where_they_meet_only():
    worker, rows = worker_and_rows(
        config_of((2, 1, WORLD.size // 2), outer_interval=3), recorder=Recorder(1 << 16)
    )
    for step in range(1, STEPS + 1):
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
    across = [
        (record.step, record.name)
        for record in worker.recorder.records
        if {rank // (WORLD.size // 2) for rank in worker.comms[record.axis].ranks} == {0, 1}
    ]
    size = len(worker.flats)
    names = ["outer.delta"] * size + ["outer.votes"]
    assert across == [(step, name) for step in (3, 6, STEPS) for name in names]


@pytest.mark.parametrize("values", layouts("zero 1"))
def test_a_meeting_is_as_explain_predicts_it(values):
    if "ep" not in values:  # the rows of experts depend on the numbers
        assert_records_predicted(config_of(outer_interval=1, **values))


@pytest.mark.parametrize(
    "values",
    [{"dtype": "bfloat16"}]
    + [{"zero": 1, "dtype": "bfloat16"}, {"zero": 1}, {"zero": 3}] * (WORLD.size > 2),
    ids=str,
)
def test_evaluation_reads_the_outer_weights_and_changes_nothing(values):
    worker, rows = worker_and_rows(config_of(outer_interval=3, **values))
    first, _ = evaluate(worker, rows)
    state = state_of(worker)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    assert WORLD.allreduce(state_of(worker) != state) > 0
    state = state_of(worker)
    assert evaluate(worker, rows)[0] == first
    assert state_of(worker) == state


def state_of(worker):
    return [x.tobytes() for flat in worker.flats for x in (flat.data, *flat.state.values())]


RESUMED = [{"layout": (2, 1, 2)}, {"layout": (2, 2, 1)}, {"layout": (4, 1, 1), "zero": 1}]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_checkpoint_between_two_meetings(dtype, folder):
    """On the same layout it goes on bit by bit; others inside the islands hold the same state."""
    made = {"outer_interval": 3, "dtype": dtype, **ADAM}
    config = config_of(**made)
    worker, rows = worker_and_rows(config)
    saved = None
    for step in range(1, STEPS + 1):
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
        if step == 4:
            Saver(worker, folder, keep=2, background=False, facts=FACTS).save(4)
            saved = state_of(worker)
    again = loaded(config, folder)
    replicas = Replicas(again)
    replicas.check(4)
    if WORLD.rank == 0:
        again.flats[0].moments["m"][7] += 1
    if WORLD.size == 4:  # ranks 0 and 1 are an island
        assert "first moment" in raised_everywhere(DriftError, lambda: replicas.check(4))
    again = loaded(config, folder)
    assert WORLD.allreduce(state_of(again) != saved) == 0
    for step in range(5, STEPS + 1):
        again.train_step(step, lambda mb, step=step: rows.train(step, mb))
    assert WORLD.allreduce(state_of(again) != state_of(worker)) == 0
    for number, values in enumerate(RESUMED if WORLD.size == 4 else ()):
        other = folder / f"{number}"
        moved = loaded(config_of(**made, **values), folder)
        Saver(moved, other, keep=2, background=False, facts=FACTS).save(4)
        back = loaded(config, other)
        assert WORLD.allreduce(state_of(back) != saved) == 0, values


def loaded(config, folder):
    """This rank with the state of the newest checkpoint of a folder."""
    WORLD.Barrier()
    worker, (_, path) = worker_of(config), committed_steps(folder)[-1]
    load_state(worker, path, read_manifest(path))
    return worker


def test_another_number_of_islands_is_refused(folder):
    worker, _ = worker_and_rows(config_of(islands=2))
    Saver(worker, folder, keep=2, background=False, facts=FACTS).save(1)
    for other in (None, 1):
        with pytest.raises(DataError, match="is of another model"):
            loaded(config_of(islands=other), folder)


def test_a_bad_number_ends_its_island_and_names_its_ranks():
    worker, rows = worker_and_rows(config_of(outer_interval=3))
    island = worker.island
    if island:
        worker.flats[0].master[5] = np.inf
    if not island:
        worker.train_step(1, lambda mb: rows.train(1, mb))
        return
    with pytest.raises(NonFiniteError, match=rf"on rank {WORLD.size // 2} \(island1"):
        train_step(worker, 1, lambda mb: rows.train(1, mb))
