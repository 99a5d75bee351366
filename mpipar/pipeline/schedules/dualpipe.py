"""DualPipe and DualPipeV: two streams of microbatches cross on each rank, F beside B.

Letters: p = pp_size, r = pp_rank, m = num_microbatches. Sources: arXiv 2412.19437 and the step list
that its authors published.
"""

from collections import deque

from mpipar.pipeline.instructions import Instr


class TwoStreams:
    """A program to which passes of two streams are added, each with its own microbatch counters.

    streams: (stage, first microbatch) of stream 0 and stream 1 on this rank.
    """

    def __init__(self, streams: tuple[tuple[int, int], tuple[int, int]]):
        self.stages = [stage for stage, _ in streams]
        self.next_forward = [first for _, first in streams]
        self.next_backward = [first for _, first in streams]
        self.late_weights: deque[Instr] = deque()
        self.program: list[Instr] = []

    def forward(self, stream: int) -> None:
        """Add the next forward of the stream."""
        self.program.append(Instr("F", self.stages[stream], self.next_forward[stream]))
        self.next_forward[stream] += 1

    def backward(self, stream: int, split: bool = False) -> None:
        """Add the next backward of the stream. split: run only I and queue its W."""
        stage, mb = self.stages[stream], self.next_backward[stream]
        self.program.append(Instr("I" if split else "B", stage, mb))
        if split:
            self.late_weights.append(Instr("W", stage, mb))
        self.next_backward[stream] += 1

    def weight(self) -> None:
        """Add the oldest postponed W of either stream, if there is one."""
        if self.late_weights:
            self.program.append(self.late_weights.popleft())

    def overlapped(self, forward: int, backward: int) -> None:
        """Add the next forward of one stream together with the next backward of the other."""
        mb, mb_b = self.next_forward[forward], self.next_backward[backward]
        self.program.append(
            Instr("OVERLAP_F_B", self.stages[forward], mb, self.stages[backward], mb_b)
        )
        self.next_forward[forward] += 1
        self.next_backward[backward] += 1


def eight_steps(two: TwoStreams, depth: int, near: int, pairs: int) -> list[Instr]:
    """Return the published step list of a rank that is `near` hops from where stream 0 enters.

    `depth` is the number of ranks up to the fold.

        1  2(depth-near-1) x F0          fill stream 0 up to the fold
        2  (near+1) x (F0, F1)           stream 1 comes back
        3  (depth-near-1) x (I1, W, F1)
        4  pairs x (F0&B1, F1&B0)        steady state
        5  (depth-near-1) x (B1, F1&B0)
        6  (near+1) x (B1, B0)           I instead of B from half way on: W waits for the drain
        7  (depth-near-1) x (W, I0)
        8  (near+1) x W
    """
    far = depth - near - 1
    for _ in range(2 * far):
        two.forward(0)
    for _ in range(near + 1):
        two.forward(0)
        two.forward(1)
    for _ in range(far):
        two.backward(1, split=True)
        two.weight()
        two.forward(1)
    for k in range(pairs):
        if k == 0 and far == 0:
            # All ranks wait for this first B1 at the fold, so it must not wait for an overlap.
            two.forward(0)
            two.backward(1)
        else:
            two.overlapped(0, 1)
        two.overlapped(1, 0)
    for _ in range(far):
        two.backward(1)
        two.overlapped(1, 0)
    half = (near + 1) // 2
    for k in range(near + 1):
        two.backward(1, split=k > half or (k == half and near % 2 == 1))
        two.backward(0, split=k >= half)
    for _ in range(far):
        two.weight()
        two.backward(0, split=True)
    for _ in range(near + 1):
        two.weight()
    return two.program


def dualpipe(p: int, r: int, m: int) -> list[Instr]:
    """Return DualPipe: two copies of the model, fed from both ends (p even, m even, m >= 2p).

    Rank r holds stage r and stage p-1-r. Microbatches below m/2 enter at rank 0 (direction A), the
    others at rank p-1 (direction B). Stream 0 of a rank is the direction whose entry is nearer. The
    fold is between the two middle ranks.
    """
    direction_a, direction_b = (r, 0), (p - 1 - r, m // 2)
    streams = (direction_a, direction_b) if r < p // 2 else (direction_b, direction_a)
    near = min(r, p - 1 - r)
    return eight_steps(TwoStreams(streams), p // 2, near, m // 2 - p + near + 1)


def dualpipe_v(p: int, r: int, m: int) -> list[Instr]:
    """Return DualPipe cut in half: one copy of the model, whose stream 0 returns as stream 1.

    Rank r holds stage r (stream 0) and stage 2p-1-r (stream 1); every microbatch passes both
    (m >= 2p).
    """
    return eight_steps(TwoStreams(((r, 0), (2 * p - 1 - r, 0))), p, r, m - 2 * p + r + 1)
