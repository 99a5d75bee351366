"""Loss and choice of tokens over a vocabulary shard, for NumPy and CuPy alike: part of `ArrayOps`.

N tokens, V columns of the shard. Columns j with start + j >= num_valid are padding, worth -inf.
"""

import numpy as np

# The maximum over no columns. It is finite, so minus the true maximum it is never inf - inf = NaN.
EMPTY_MAX = -1e30


class LossOps:
    """Cross-entropy in parts that are combined over shards, and the best token of a shard."""

    def cross_entropy_forward(self, logits, targets, start, num_valid):
        """Return stats (N, 3): maximum, sum of exp(logit - maximum), logit of the target or 0.

        logits (N, V), targets (N,) global ids below num_valid. A shard that is all padding gives
        (EMPTY_MAX, 0, 0).
        """
        valid = logits[:, : valid_columns(logits, start, num_valid)]
        stats = self.xp.zeros((logits.shape[0], 3), self.dtype)
        stats[:, 0] = self.scalar(EMPTY_MAX)
        if valid.shape[1]:
            stats[:, 0] = valid.max(axis=1)
            stats[:, 1] = self._exp_sums(valid, stats[:, 0])
            column, inside = self._local_rows(targets, start, valid.shape[1])
            picked = valid[self.xp.arange(len(targets)), column]
            stats[:, 2] = self.xp.where(inside, picked, self.scalar(0.0))
        return stats

    def _exp_sums(self, valid, top):
        """Return the sum of exp(value - top) of each row of valid."""
        part = valid - top[:, None]
        return self._row_sums(self.xp.exp(part, out=part))

    def cross_entropy_combine(self, stats):
        """Return (loss (N,), lse (N,)) from the stats of all shards (shards, N, 3)."""
        top = stats[..., 0].max(axis=0)
        total = (stats[..., 1] * self.xp.exp(stats[..., 0] - top)).sum(axis=0)
        lse = top + self.xp.log(total)
        return lse - stats[..., 2].sum(axis=0), lse

    def cross_entropy_backward_input(self, logits, targets, lse, start, num_valid, scale):
        """Write (softmax - onehot) * scale over logits (padding: 0) and return that array."""
        columns = valid_columns(logits, start, num_valid)
        valid = logits[:, :columns]
        logits[:, columns:] = self.scalar(0.0)
        self._scaled_softmax(valid, lse, scale)
        column, inside = self._local_rows(targets, start, columns)
        rows = self.xp.nonzero(inside)[0]
        valid[rows, column[rows]] -= self.scalar(scale)  # one target a row: no index occurs twice
        return logits

    def _scaled_softmax(self, valid, lse, scale):
        """Write softmax * scale over valid."""
        valid -= lse[:, None]
        self.xp.exp(valid, out=valid)
        valid *= self.scalar(scale)

    def top_forward(self, logits, start, num_valid, count):
        """Return (N, count, 2) float64: the largest logits and their global ids, best first.

        Of equal logits the lowest id comes first. A shard of fewer columns fills up with -inf.
        The first logit of a row that holds NaN is NaN.
        """
        xp, valid = self.xp, logits[:, : valid_columns(logits, start, num_valid)]
        columns = valid.shape[1]
        take = min(count, columns)
        best = xp.empty((logits.shape[0], count, 2), np.float64)
        best[..., 0], best[..., 1] = -np.inf, start
        if take:
            top = valid.max(axis=1)
            last = top if take == 1 else (
                xp.partition(valid, columns - take, axis=1)[:, columns - take])
            for row in range(len(valid)):
                # Only what reaches the last place is sorted. All that equal it do.
                ids = xp.nonzero(valid[row] >= last[row])[0]
                ids = ids[xp.argsort(-valid[row, ids], kind="stable")[:take]]
                best[row, : len(ids), 0] = valid[row, ids]
                best[row, : len(ids), 1] += ids
            best[:, 0, 0] = top  # NaN if any logit is
        return best


def valid_columns(logits, start, num_valid):
    """Return how many leading columns of a shard are not padding."""
    return min(max(num_valid - start, 0), logits.shape[1])
