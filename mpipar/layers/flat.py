"""The flat buffers of a stage: data, gradients and masters of its parameters, in one order."""

from __future__ import annotations

import itertools

from mpipar.layers.shards import WHOLE, packed


class FlatParams:
    """Data, gradients and master weights of a list of parameters, each kind in one flat buffer.

    Every Param is a view into all three buffers, as far as this rank holds it whole.

    With 16-bit data, gradients and master weights are float32: an update is often too small to
    change a 16-bit number. Otherwise the master weights are the data.

    Parameters whose gradient needs only the data group come first, then the others by their groups.
    Inside each, units go from the last to the first, as their gradients are completed. Inside each
    unit, parameters with decay come first. So an optimizer update is two long runs for each unit,
    and a bucket of gradients or a group's sum is a slice.

    sharding: what ranks share out, see `shards.py`. Then zeros fill each unit's run of equal groups
    up to a multiple of the ranks. A buffer is either whole, in this order, or it holds the pieces
    of this rank alone, one behind the other.

    size: elements of all parameters, without those zeros. total: with them; own_size: those that
    this rank owns. by_groups: (grad_groups, slice) of each run of parameters. by_decay: (decay,
    slice) of each run. units: {unit: {grad_groups: slice}}, in the order of the buffers.

    segments: what ranks share out one by one, see `shards.py`; own: this rank's piece of each.
    updates: for each segment, (decay, slice of the own piece) of each run. owned: (segment, slice
    of the own piece) of the parameters that this rank counts; copies: those of all others. summed:
    for each segment, the array that holds the own piece of the gradient when all ranks have added
    theirs.
    """

    def __init__(self, ops, params, sharding=WHOLE):
        self.ops, self.sharding = ops, sharding
        self.params = sorted(params, key=lambda p: (
            len(p.grad_groups), p.grad_groups, -p.unit, not p.decay))
        largest = max(self.params, key=lambda p: p.size).name if params else "none"
        # for the error that reports a lack of memory
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        self.size = sum(p.size for p in self.params)
        self._number()
        self.own_size = own_size = self.total // sharding.count
        data_size = own_size if sharding.level == 3 else self.total
        self.data = self.master = ops.zeros((data_size,), label="weights")
        grad_size = self.total if sharding.whole_grads else own_size
        self.grad = ops.zeros((grad_size,), ops.statistics, label="gradients")
        if ops.dtype != ops.statistics:
            self.master = ops.zeros((own_size,), ops.statistics, label="optimizer")
        for kind in ("data", "grad", "master"):
            buffer = getattr(self, kind)
            if self.is_whole(buffer):
                self.place(kind, buffer)
            else:
                self.displace(kind, slice(0, self.total))
        self.summed = self.pieces(self.grad) if not sharding.whole_grads else [
            self.grad[whole.run.start:whole.run.start + own.stop - own.start]
            for whole, own in zip(self.segments, self.own, strict=True)]

    def _number(self) -> None:
        """Find the place of each parameter, the runs, and the segments."""
        self.starts, start, last = {}, 0, None
        for param in self.params:
            run = param.grad_groups, param.unit
            if run != last:
                start, last = padded(start, self.sharding.count), run
            self.starts[param] = start
            start += param.size
        self.total = padded(start, self.sharding.count)
        self.by_groups = self._runs(lambda param: param.grad_groups)
        self.by_decay = self._runs(lambda param: param.decay)
        self.units: dict[int, dict[tuple[str, ...], slice]] = {}
        by_unit = self._runs(lambda param: (param.grad_groups, param.unit))
        for (groups, unit), run in by_unit:
            self.units.setdefault(unit, {})[groups] = run
        self.segments = self.sharding.segments(by_unit, self.total)
        self.own = self.sharding.own(self.segments)
        self.packed = packed(self.own)
        self.updates: list[list] = [[] for _ in self.segments]
        for decay, segment, place in self._within_own(self.by_decay):
            self.updates[segment].append((decay, place))
        owners = list(self._within_own(self._runs(lambda param: param.owner)))
        self.owned, self.copies = (
            [place for owner, *place in owners if owner == wanted] for wanted in (True, False))

    def place(self, kind, buffer, run=None):
        """Make `kind` of every Param and Joined in a run of the flat order its view of a buffer.

        run: what the buffer holds, by default all.
        """
        run = run or slice(0, self.total)
        for param in self.params_in(run):
            place = self.starts[param] - run.start
            setattr(param, kind, buffer[place:place + param.size].reshape(param.local_shape))
            if param.leads:
                last = param.leads.params[-1]
                assert self.starts[last] + last.size - self.starts[param] == param.leads.size
                setattr(param.leads, kind, buffer[place:place + param.leads.size])

    def _runs(self, key):
        """Contiguous runs of parameters with equal key(param): (key value, slice) of each.

        The zeros behind a parameter belong to its run.
        """
        found, edges, number = [], [*self.starts.values(), self.total], 0
        for value, params in itertools.groupby(self.params, key):
            first, number = number, number + len(list(params))
            found.append((value, slice(edges[first], edges[number])))
        return found

    def _within_own(self, runs):
        """Yield (value, segment, slice of the own piece) of the parts of runs that it owns."""
        for value, run in runs:
            for segment, own in enumerate(self.own):
                first, stop = max(run.start, own.start), min(run.stop, own.stop)
                if first < stop:
                    yield value, segment, slice(first - own.start, stop - own.start)

    def is_whole(self, buffer) -> bool:
        """Whether a buffer holds all parameters, and not this rank's pieces alone."""
        return buffer.size == self.total

    def params_in(self, run) -> list:
        """The parameters that lie in a run of the flat order."""
        return [param for param, start in self.starts.items() if run.start <= start < run.stop]

    def length(self, segment: int) -> int:
        """Elements of a segment."""
        run = self.segments[segment].run
        return run.stop - run.start

    def title(self, segment: int) -> str:
        """The layer of a segment's first parameter, as in block3, for the name of a barrier."""
        return self.params_in(self.segments[segment].run)[0].name.split(".")[0]

    def displace(self, kind, run) -> None:
        """Take `kind` from every Param and Joined in a run of the flat order."""
        for param in self.params_in(run):
            setattr(param, kind, None)
            if param.leads:
                setattr(param.leads, kind, None)

    def views(self, buffer):
        """Yield (Param, its view of its local shape) of a whole buffer with this order."""
        for param, start in self.starts.items():
            yield param, buffer[start:start + param.size].reshape(param.local_shape)

    def piece(self, buffer, segment: int):
        """The own piece of a segment in a buffer."""
        return buffer[(self.own if self.is_whole(buffer) else self.packed)[segment]]

    def pieces(self, buffer) -> list:
        """The own piece of each segment in a buffer."""
        return [self.piece(buffer, segment) for segment in range(len(self.segments))]

    def parts(self, param, pieces):
        """Yield (first, values) of what own pieces hold of a parameter.

        first: place of the values in the flattened array of its local shape.
        """
        start = self.starts[param]
        for own, piece in zip(self.own, pieces, strict=True):
            low, high = max(start, own.start), min(start + param.size, own.stop)
            if low < high:
                yield low - start, piece[low - own.start:high - own.start]

    def held(self, buffer):
        """Yield (Param, first, values) of all that a buffer holds; see `parts`."""
        whole = self.is_whole(buffer)
        pieces = [] if whole else self.pieces(buffer)
        for param, start in self.starts.items():
            if whole:
                yield param, 0, buffer[start:start + param.size]
            else:
                yield from ((param, *part) for part in self.parts(param, pieces))

    @property
    def weights(self) -> list:
        """The buffers to fill with weights from outside; `publish` makes the rest of them."""
        same = self.master.size == self.data.size
        return [self.master] if same else [self.master, self.data]

    def keep(self, param, x) -> None:
        """Set what this rank holds of a parameter to its part of x, of the local shape."""
        flat, start = x.reshape(-1), self.starts[param]
        for buffer in self.weights:
            parts = [(0, buffer[start:start + param.size])] if self.is_whole(buffer) else (
                self.parts(param, self.pieces(buffer)))
            for first, view in parts:
                self.ops.copy(view, flat[first:first + view.size])

    def initialize(self, seed: int, spread: float = 0.0) -> None:
        """Set every parameter to its initial values; padding stays zero.

        spread: standard deviation around the constant of biases and norms. Training starts them at
        0 and 1. A comparison needs a spread: a zero bias that is counted twice is still zero.
        """
        for buffer in self.weights:
            for param, first, view in self.held(buffer):
                if param.fill is not None and not spread:
                    self.ops.fill(view, param.fill)
                    continue
                values = param.initial_run(seed, spread, first, view.size, self.ops.statistics)
                self.ops.copy(view, self.ops.asarray(values))
        self.publish()

    def publish(self) -> None:
        """Round changed master weights to the data, where a rank holds as much of both."""
        if self.master is not self.data and self.master.size == self.data.size:
            self.ops.copy(self.data, self.master)


def padded(length: int, count: int) -> int:
    """The next multiple of count."""
    return -(-length // count) * count
