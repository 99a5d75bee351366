"""Cases of the law of equality, in which most pairs of values meet.

Those in drawn.json were drawn at random, until new ones added few pairs. new_cases.py adds some for
new values, or has lives/array.py find a case for every legal pair.
"""

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from small_model import EXPERTS, MODEL, small_config

from mpipar.config.model import ModelConfig, model_config
from mpipar.config.resolve import resolve
from mpipar.errors import UserError
from mpipar.models import decoder
from mpipar.run.resolve import RULES
from tests.helpers.lives.array import first_of, pairs, read, read_for, row_of, write
from tests.helpers.lives.choices import every, others

FILE = Path(__file__).with_name("drawn.json")
SIZES = (1, 2, 3, 4, 8)
MOST = {1: 30, 3: 20, 4: 64, 8: 16}  # cases; the session of 2 ranks has all that are found
MORE = 6  # cases of each size that a new value adds
WIDE = 181  # the width at which a block of the small model has three times the FLOPs


class Wide(ModelConfig):
    """Blocks of odd numbers have a wider feed-forward network."""

    def block_kind(self, index):
        return "wide" if index % 2 else "dense"


class Halves(ModelConfig):
    """Blocks of odd numbers have no attention, those of even numbers nothing else."""

    def block_kind(self, index):
        return "ffn" if index % 2 else "attention"


def wide_block(context, config, index, rotation):
    return decoder.dense_block(context, replace(config, ffn=WIDE), index, rotation)


def branch(number):
    """One of the two branches of a dense block, as a block of its own."""
    return lambda *args: decoder.dense_block(*args)[number:][:1]


# More rows of BLOCKS, which the models above choose.
ROWS = {"wide": wide_block, "attention": branch(0), "ffn": branch(1)}
# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
SHAPE = {
    "layers": 5,
    "d_model": 20,
    "heads": 8,
    "head_dim": 6,
    "ffn": 31,
    "seq_len": 16,
    "vocab_size": 29,
    "rope_theta": 50.0,
    "rope_scaling": (4.0, 1.0, 3.0, 12.0),
}
ARCHS = {
    "llama": {"arch": "llama", "kv_heads": 4},
    "mistral": {"arch": "mistral", "kv_heads": 8},
    "qwen2": {"arch": "qwen2", "kv_heads": 2},
    "tied": {"arch": "llama", "kv_heads": 1, "tied": True, "bias": "all"},
    "mixed": {"arch": "gpt2", "positions": "rope", "norm": "rms", "bias": "none", "norm_eps": 0.01},
}
GATED = {"arch": "llama", "activation": "swiglu", "norm": "rms", "bias": "none"}
MODELS = {
    "gpt2": MODEL,
    **{name: model_config(SHAPE | values) for name, values in ARCHS.items()},
    "experts": replace(EXPERTS, layers=5),
    "gated experts": replace(EXPERTS, layers=5, **GATED, shared_expert_ffn=11, expert_interval=2),
    "unequal blocks": Wide(**asdict(MODEL)),
    "half blocks": Halves(**asdict(MODEL)),
}
CHOICES = {
    "model": tuple(MODELS),
    "schedule": ("1f1b", *(name for name in every("schedule") if name != "1f1b")),
    "num_microbatches": (4, 1, 2, 5, 8),
    "layers": (5, 8),
    "seq_len": (8, 1, 2, 3, 5, 7, 16),
    "stage_layers": (None, (0, 5), (5, 0), (4, 1), (0, 3, 2, 0), (3, 0, 0, 2), (0, 0, 5, 0)),
    "rank_order": (None, "tp,cp,dp,pp"),
    "norm": others("norm"),
    "tied": (None, False),
    "ffn_cut": others("ffn_cut"),
    "sequence_parallel": (None, True),
    "tp_matmul": others("tp_matmul"),
    "cp_attention": others("cp_attention"),
    "ep": (None, 2, 4),
    "experts_per_token": (None, 1, 4),
    "router_balance": others("router_balance"),
    "recompute": others("recompute"),
    "zero": every("zero"),
    "reshard_after_forward": others("reshard_after_forward"),
    "all_reduce": others("all_reduce"),
}


def config_of(case, **more):
    """The configuration of a case."""
    values = {name: value for name, value in case.items() if value is not None} | more
    (layout, cp), model = values.pop("layout"), MODELS[values.pop("model")]
    return small_config(layout, model=model, rows_per_mb=4, cp=cp, **values)


def shapes(size):
    """Every (dp, pp, tp) and cp of so many ranks."""
    sizes = [n for n in (1, 2, 3, 4, 8) if size % n == 0]
    return [
        (axes[:3], axes[3])
        for axes in itertools.product(sizes, repeat=4)
        if np.prod(axes) == size and max(axes) <= 4
    ]


def choices_of(size):
    return {"layout": shapes(size)} | CHOICES


def refusals(case):
    """mpipar's objections to a whole case."""
    try:
        config = config_of(case)
        resolve(config, config.grid.num_ranks, rules=RULES, csv=None, machine=None)
    except UserError as error:
        return error.problems
    return []


def cases(size):
    """The kept cases for so many ranks."""
    first = first_of(choices_of(size))
    return [first | row for row in read_for(FILE, CHOICES)[str(size)]]


def text_of(case):
    """A case as the name of a test: what is not at its first value."""
    axes, cp = case["layout"]
    layout = "x".join(map(str, (*axes, cp)))
    return " ".join(
        [layout]
        + [
            f"{name} {value}"
            for name, value in case.items()
            if name in CHOICES and value != CHOICES[name][0]
        ]
    )


def extended(size, before, rows):
    """A few cases for new values, then those of the kept rows that are still legal.

    before: the choices of the rows.
    """
    choices = choices_of(size)
    first = first_of({name: before.get(name, values) for name, values in choices.items()})
    old = [first | row for row in rows]
    kept = [
        case
        for case in old
        if all(value in choices.get(name, ()) for name, value in case.items())
        and not refusals(case)
    ]
    new = {
        (name, value)
        for name, values in CHOICES.items()
        for value in values
        if value not in before.get(name, values[:1])
    }
    more, _ = pairs(choices, refusals, kept, new, MORE * len(new))
    return [*more, *kept]


def find(anew):
    """Add cases for new values to the file, or find all cases anew."""
    decoder.BLOCKS.update(ROWS)
    before, rows = read(FILE)
    arrays = {}
    for size in SIZES:
        choices = choices_of(size)
        found = (
            pairs(choices, refusals, most=MOST.get(size))[0]
            if anew
            else extended(size, before, rows[str(size)])
        )
        arrays[str(size)] = [row_of(case, choices) for case in found]
        print(f"{FILE.name}, {size} ranks: {len(found)} cases", flush=True)
    write(FILE, CHOICES, arrays)
