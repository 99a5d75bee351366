"""The comparison with one rank must fail for every known bug: each is planted here once."""

import pytest
from small_model import assert_equals_one_rank, small_config

from mpipar.comm.group import Comm
from mpipar.layers.linear import Linear
from mpipar.partition import row
from mpipar.pipeline.engine import Engine
from mpipar.train.gradsync import GradSync
from mpipar.train.worker import Worker

pytestmark = pytest.mark.ranks(2)
DP, PP, TP = (2, 1, 1), (1, 2, 1), (1, 1, 2)


def assert_caught(layout, **options):
    with pytest.raises(AssertionError, match=r"tensors differ"):
        assert_equals_one_rank(small_config(layout, **options))


def test_unbroken_passes():
    for layout in (DP, PP, TP):
        assert_equals_one_rank(small_config(layout))


def test_reduce_dropped_in_a_layer(monkeypatch):
    plain = Comm.all_reduce

    def all_reduce(self, x, name, op="sum"):
        return x if name == "block1.ffn.up" else plain(self, x, name, op)

    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    assert_caught(TP)


def test_gradient_bucket_dropped(monkeypatch):
    plain = Comm.iall_reduce
    calls = []

    def iall_reduce(self, x, name):
        calls.append(name)
        return plain(self, x.copy() if len(calls) == 3 else x, name)

    monkeypatch.setattr(Comm, "iall_reduce", iall_reduce)
    assert_caught(DP)


def test_reduce_doubled(monkeypatch):
    plain = GradSync.finish

    def finish(self):
        plain(self)
        self.comms.dp.all_reduce(next(iter(self.stages.values())).flat.grad, "again")

    monkeypatch.setattr(GradSync, "finish", finish)
    assert_caught(DP)


def test_unit_summed_before_its_last_weight_gradient(monkeypatch):
    def enter(self, unit):
        if self.passing in self.last_passes:
            self.gradsync.start_unit(self.passing.stage, unit)

    monkeypatch.setattr(Engine, "enter", enter)
    monkeypatch.setattr(Engine, "leave", lambda self, unit: None)
    assert_caught(DP)


def test_row_bias_added_on_every_rank(monkeypatch):
    def forward(self, x, stash):
        stash[self.name, "x"] = x
        if self.cut is not row:
            return plain(self, x, stash)
        y = self.ops.matmul(x, self._matrix("data"))  # before the sum: counted once per rank
        return self.comm.all_reduce(
            self.ops.bias_forward(y, self.b.data.reshape(-1)), self.name)

    plain = Linear.forward
    monkeypatch.setattr(Linear, "forward", forward)
    assert_caught(TP)


def test_tied_gradient_twice(monkeypatch):
    plain = GradSync.finish

    def finish(self):
        plain(self)
        for stage in self.stages.values():
            for groups, run in stage.flat.by_groups:
                if "tie" in groups:
                    self.comms.by_axis["tie"].all_reduce(stage.flat.grad[run], "again")

    monkeypatch.setattr(GradSync, "finish", finish)
    assert_caught(PP)


def test_tie_forgotten(monkeypatch):
    plain = Comm.all_reduce
    monkeypatch.setattr(
        Comm, "all_reduce",
        lambda self, x, name, op="sum": x if self.axis == "tie" else plain(self, x, name, op))
    assert_caught(PP)


@pytest.mark.parametrize("layout", [PP, TP], ids=["tied copies", "replicated norms"])
def test_norm_counts_copies(monkeypatch, layout):
    plain = GradSync.square_sum

    def square_sum(self):
        for stage in self.stages.values():
            stage.flat.owned = [(0, slice(stage.flat.size))]
        return plain(self)

    # One row of the comparison is enough to catch it: the norm.
    monkeypatch.setattr(GradSync, "square_sum", square_sum)
    assert_caught(layout)


def test_weight_gradient_skipped_once(monkeypatch):
    plain = Linear.backward_weight
    calls = []

    def backward_weight(self, stash):
        calls.append(self.name)
        if len(calls) == 5:
            stash.pop((self.name, "x"))
            stash.pop((self.name, "dy"))
        else:
            plain(self, stash)

    monkeypatch.setattr(Linear, "backward_weight", backward_weight)
    assert_caught(PP)


def test_microbatches_swapped(monkeypatch):
    plain = Engine.run

    def run(self, program, get_batch, training=True):
        if self.comm.index == 1 and self.comm.size == 2:
            return plain(self, program, lambda mb: get_batch(mb ^ 1), training)
        return plain(self, program, get_batch, training)

    monkeypatch.setattr(Engine, "run", run)
    assert_caught(PP)


def test_receive_buffer_aliased(monkeypatch):
    plain = Engine._receive

    def receive(self, instr):
        if not hasattr(self, "buffer"):
            shape = self.stages[instr.stage].in_shape(self.get_batch(instr.mb))
            self.buffer = self.ops.empty(shape)
        empty, self.ops.empty = self.ops.empty, lambda shape, label: self.buffer
        try:
            plain(self, instr)
        finally:
            self.ops.empty = empty

    monkeypatch.setattr(Engine, "_receive", receive)
    assert_caught(PP, schedule="gpipe")


def test_loss_scaled_per_microbatch(monkeypatch):
    plain = Worker.gradients

    def gradients(self, step, get_batch, *asks):
        self.num_tokens //= self.schedule.num_microbatches
        try:
            return plain(self, step, get_batch, *asks)
        finally:
            self.num_tokens *= self.schedule.num_microbatches

    monkeypatch.setattr(Worker, "gradients", gradients)
    assert_caught(PP)
