"""Which dp x pp x tp for a number of ranks: every layout that fits, and the one to take.

It is plain arithmetic on sizes. Messages name the flags, because a user reads them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from mpipar.comm.grid import PIECES_PER_RANK
from mpipar.files.text import counted

Layout = tuple[int, int, int]  # (dp, pp, tp)


def shown_axes(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """(axis, size) in the order in which layouts are written; cp only where it is cut."""
    return [(axis, sizes[axis]) for axis in ("dp", "pp", "cp", "tp")
            if axis != "cp" or sizes[axis] > 1]


def sizes_text(sizes: Mapping[str, int]) -> str:
    """A layout for a reader, as 'dp 2 x pp 2 x tp 1'."""
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes(sizes))


def typed(sizes: Mapping[str, int]) -> str:
    """A layout as a flag to type."""
    return "--layout " + ",".join(f"{axis}={size}" for axis, size in shown_axes(sizes))


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    low = [small for small in range(1, math.isqrt(number) + 1) if number % small == 0]
    return sorted({*low, *(number // small for small in low)})


def listing(values: Iterable[int], near: int, count: int = 6) -> str:
    """The `count` values nearest to `near`, ascending, as '1, 2 or 4'."""
    nearest = sorted(sorted(values, key=lambda value: (abs(value - near), value))[:count])
    words = [str(value) for value in nearest]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def cuts_heads(tp: int, heads: int, kv_heads: int) -> bool:
    """Whether tp ranks have equal numbers of heads, and whole heads of keys and values.

    With more ranks than heads of keys and values, some ranks hold the same one.
    """
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def fitting(world_size: int, layers: int, heads: int, kv_heads: int | None = None) -> list[Layout]:
    """Every (dp, pp, tp) that uses all ranks. tp cuts the heads; pp is at most the layers.

    kv_heads: those of keys and values, by default as many as of queries.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    return [(world_size // (tp * pp), pp, tp)
            for tp in divisors(world_size) if cuts_heads(tp, heads, kv_heads)
            for pp in divisors(world_size // tp) if pp <= layers]


def choose(given: tuple[int | None, int | None, int | None], world_size: int,
           layers: int, heads: int, d_model: int, fixed: bool = False, *, cp: int = 1,
           kv_heads: int | None = None) -> tuple[Layout, list[str]]:
    """The layout for `given` axes (dp, pp, tp; None = free), and what is wrong with those given.

    heads, kv_heads: see `ModelConfig.whole_heads`; every other width may be cut over any tp.
    fixed: the shape is that of weights, so only the layout can be changed.
    cp: the size of that axis, which is never chosen.

    If there are problems, the layout holds the given axes, and 1 for an unknown one. So a caller
    can go on and look for more problems.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    options = fitting(world_size // cp, layers, heads, kv_heads) if world_size % cp == 0 else []
    matching = [one for one in options
                if all(want in (None, have) for want, have in zip(given, one, strict=True))]
    if matching:
        return min(matching, key=_preference(given, world_size // cp)), []
    dp, pp, tp = given
    found = _product_problems(given, world_size, options, cp)
    if tp and heads % tp:
        found.append(_heads_problem(tp, world_size, heads, 0 if fixed else d_model))
    elif tp and not cuts_heads(tp, heads, kv_heads):
        legal = [one for one in divisors(heads) if cuts_heads(one, heads, kv_heads)]
        found.append(f"--kv-heads {kv_heads}: must be a multiple of tp {tp}, or divide it; use"
                     f" --tp {listing(legal, tp)}")
    if pp and pp > layers:
        found.append(f"--pp {pp}: needs as many blocks, but --layers is {layers}; use --pp "
                     f"{listing(range(max(1, layers - 5), layers + 1), pp)}"
                     f"{'' if fixed else f', or --layers {pp}'}")
    if not found:
        found.append(f"no layout of {counted(world_size, 'rank')} fits the axes given and the"
                     f" model's shape; use one of: {_shown(options, cp)}")
    return (dp or 1, pp or 1, tp or 1), found


def _heads_problem(tp: int, world_size: int, heads: int, d_model: int) -> str:
    """The message that heads cannot be cut over tp ranks, with what to type instead.

    The number of heads must also divide d_model, which is 0 if the shape is fixed.
    """
    cuts = listing(divisors(math.gcd(heads, world_size)), tp)
    legal = [number for number in divisors(d_model) if number % tp == 0] if d_model else []
    other = f", or --heads {listing(legal, heads, 2)}" if legal else ""
    return f"--heads {heads}: must be a multiple of tp {tp}; use --tp {cuts}{other}"


def _preference(given, world_size: int):
    """Sort key for layouts: tp 2 if a multiple of 4 ranks is free, pp 2 if even, the rest dp.

    A second tp rank divides memory and work but sends most, so the default is never more than two.
    A second pp rank sends least. dp takes the rest, because growing it takes no more memory per
    rank.
    """
    _, pp, tp = given
    free = world_size // math.prod(axis or 1 for axis in given)
    want_tp = tp or (2 if free % 4 == 0 else 1)
    left = free if tp else free // want_tp
    want_pp = pp or (2 if left % 2 == 0 else 1)
    return lambda one: (abs(one[2] - want_tp), abs(one[1] - want_pp))


def _product_problems(given, world_size: int, options: list[Layout], cp: int) -> list[str]:
    """The axes given cannot make up the number of ranks that were started."""
    product = cp * math.prod(axis or 1 for axis in given)
    if world_size % product == 0 and (None in given or product == world_size):
        return []
    named = [f"{name} {axis}" for name, axis in zip(("dp", "pp", "tp"), given, strict=True) if axis]
    named += [f"cp {cp}"] if cp > 1 else []
    total = f"{' x '.join(named)} = {product}" if len(named) > 1 else named[0]
    wants = f"a multiple of {product} ranks" if None in given else counted(product, "rank")
    started = "1 was started" if world_size == 1 else f"{world_size} were started"
    cure = f"start them with mpiexec -n {product}"
    cure += f", or use one of: {_shown(options, cp)}" if options else ""
    return [f"{total}: needs {wants}, but {started}; {cure}"]


def _shown(options: Sequence[Layout], cp: int, count: int = 8) -> str:
    """Layouts as flags to type."""
    shown = [typed({"dp": dp, "pp": pp, "cp": cp, "tp": tp}) for dp, pp, tp in options[:count]]
    return " | ".join(shown) + (" | ..." if len(options) > count else "")


def context_problems(model, grid) -> list[str]:
    """What keeps the tokens or the heads of a model from being cut over cp. grid: complete."""
    cp, method = grid.cp, grid.cp_attention
    if cp == 1:
        return [] if method is None else [
            (f"--cp-attention {method}: says how the ranks of --cp attend, but --cp is 1; leave it"
             " out, or type --cp 2")]
    if not model.whole_heads:
        return [f"--cp {cp}: cuts the tokens of a row, and a {model.model} has none; use --cp 1"]
    found, unit = [], cp * PIECES_PER_RANK[method]
    if model.seq_len % unit:
        up = -(-model.seq_len // unit) * unit
        down = f"{up - unit} or " if up > unit else ""
        found.append(f"--seq-len {model.seq_len}: --cp {cp} with --cp-attention {method} cuts a row"
                     f" into {unit} equal pieces; use --seq-len {down}{up}")
    heads = max(1, model.whole_kv_heads // grid.tp)
    is_cut = cuts_heads(grid.tp, model.whole_heads, model.whole_kv_heads)
    if method == "ulysses" and is_cut and heads % cp:
        found.append(f"--cp {cp}: --cp-attention ulysses deals out the heads of a rank ({heads}),"
                     f" so it takes --cp {listing(divisors(heads), cp)}; --cp-attention ring takes"
                     " any")
    return found
