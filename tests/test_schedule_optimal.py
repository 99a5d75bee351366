"""How far each schedule is from the best possible: an exact search under a memory cap.

Unit costs (f = i = w = 1). Microbatches are interchangeable, so a state is how many F, I and W each
stage has done. Time goes in steps of one pass; what a step makes can be used from the next step on.
"""

from itertools import product


def best_step(ranks, m, cap, limit):
    """Fewest steps in which all passes can be run, or None if more than `limit` are needed.

    ranks: the stages of each rank. cap: chunk-activations a rank may hold, from F until W.
    """
    start = tuple((0, 0, 0) for rank in ranks for _ in rank)
    done = tuple((m, m, m) for _ in start)
    layer = {start}
    for step in range(limit + 1):
        if done in layer:
            return step
        following = set()
        for state in layer:
            for moves in product(*(possible(state, stages, m, cap) for stages in ranks)):
                after = list(state)
                for stage, kind in moves:
                    if stage is not None:
                        counts = list(after[stage])
                        counts[kind] += 1
                        after[stage] = tuple(counts)
                if step + 1 + least_left(after, ranks, m) <= limit:
                    following.add(tuple(after))
        layer = undominated(following, one_chunk=len(start) == len(ranks))
    return None


def possible(state, stages, m, cap):
    """The (stage, kind) a rank can run now; idling is a choice only where it can save memory."""
    held = sum(state[stage][0] - state[stage][2] for stage in stages)
    moves = []
    for stage in stages:
        f, i, w = state[stage]
        if f < m and held < cap and (stage == 0 or state[stage - 1][0] > f):
            moves.append((stage, 0))
        if i < f and (stage == len(state) - 1 or state[stage + 1][1] > i):
            moves.append((stage, 1))
        if w < i:
            moves.append((stage, 2))
    forwards_only = all(kind == 0 for _, kind in moves)
    if not moves or (len(stages) > 1 and forwards_only):
        moves.append((None, None))
    return moves


def least_left(state, ranks, m):
    """A lower bound for the steps still needed: a rank's work, and the way of the last microbatch."""
    work = max(sum(3 * m - sum(state[stage]) for stage in stages) for stages in ranks)
    last = len(state) - 1
    ways = [0]
    for stage, (f, i, _) in enumerate(state):
        if i < m:
            ways.append((m - i) + stage + 1)  # down to stage 0, then its W
        if f < m:
            ways.append((m - f) + (last - stage) + last + 1 + 1)
    return max(work, *ways)


def undominated(states, one_chunk):
    """Drop states that another one is ahead of; it could do the same from there on, or idle.

    With several chunks on a rank, being ahead in one chunk's F takes memory from the other's, so
    only states with equal F are compared.
    """
    groups = {}
    for state in states:
        key = None if one_chunk else tuple(f for f, _, _ in state)
        groups.setdefault(key, []).append(tuple(count for counts in state for count in counts))
    kept = set()
    for group in groups.values():
        front = []
        for flat in sorted(group, key=sum, reverse=True):
            if not any(all(a >= b for a, b in zip(other, flat, strict=True)) for other in front):
                front.append(flat)
        kept |= {tuple(zip(*[iter(flat)] * 3, strict=True)) for flat in front}
    return kept
