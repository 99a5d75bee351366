"""Cases of the law of equality, drawn at random so that every two values meet.

    python tests/helpers/drawn.py  # draws them into drawn.json, which takes minutes

mpipar itself decides what is legal together. Where it refuses a draw, choices fall back to their
first value, one after the other. A case is a row of letters: the places of its values.
"""

import itertools
import json
import string
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from small_model import EXPERTS, MODEL, small_config

from mpipar.config.model import ModelConfig, model_config
from mpipar.config.resolve import resolve
from mpipar.config.run import SUMS
from mpipar.errors import UserError
from mpipar.models import decoder
from mpipar.pipeline.schedules.catalog import SCHEDULES
from mpipar.run.combinations import RULES

FILE = Path(__file__).with_name("drawn.json")
LETTERS = string.digits + string.ascii_lowercase
DRAWS = 250
MOST = {1: 40, 3: 40, 8: 40}  # cases; sessions of 2 and 4 ranks have every pair
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
    "model": [*MODELS],
    "schedule": ["1f1b", *(name for name in SCHEDULES if name != "1f1b")],
    "num_microbatches": [4, 1, 2, 5, 8],
    "layers": [5, 8],
    "seq_len": [8, 1, 2, 3, 5, 7, 16],
    "stage_layers": [None, (0, 5), (5, 0), (4, 1), (0, 3, 2, 0), (3, 0, 0, 2), (0, 0, 5, 0)],
    "rank_order": [None, "tp,cp,dp,pp"],
    "norm": [None, "rms"],
    "tied": [None, False],
    "ffn_cut": [None, "gather", "reduce"],
    "sequence_parallel": [None, True],
    "tp_matmul": [None, "ring"],
    "cp_attention": [None, "ring", "gather", "ulysses"],
    "ep": [None, 2, 4],
    "experts_per_token": [None, 1, 4],
    "router_balance": [None, "none", "bias"],
    "recompute": [None, "block", "attention"],
    "zero": [0, 1, 3],
    "reshard_after_forward": [None, "no"],
    "all_reduce": [None, *SUMS[1:]],
}


def config_of(case, **more):
    """The configuration of a case."""
    values = {name: value for name, value in case.items() if value is not None} | more
    layout, model = values.pop("layout"), MODELS[values.pop("model")]
    values["cp"] = values.pop("cp_size")
    return small_config(layout, model=model, rows_per_mb=4, **values)


def shapes(size):
    """Every (dp, pp, tp) and cp of so many ranks."""
    sizes = [n for n in (1, 2, 3, 4, 8) if size % n == 0]
    return [
        (axes[:3], axes[3])
        for axes in itertools.product(sizes, repeat=4)
        if np.prod(axes) == size and max(axes) <= 4
    ]


def is_legal(case):
    try:
        config = config_of(case)
        resolve(config, config.grid.num_ranks, rules=RULES, csv=None, machine=None)
    except UserError:
        return False
    return True


def drawn(size, rng):
    """One legal case for so many ranks."""
    layouts = shapes(size)
    layout, cp = layouts[rng.integers(len(layouts))]
    case = {"layout": layout, "cp_size": cp}
    case |= {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
    for name in rng.permutation([*CHOICES]):
        if is_legal(case):
            break
        if name not in ("model", "schedule"):
            case[name] = CHOICES[name][0]
    return case


def pairs_of(case):
    return set(itertools.combinations([(name, value) for name, value in case.items()], 2))


def draw(size):
    """Cases for so many ranks: every two values that meet in a draw; most new pairs first."""
    rng = np.random.default_rng(size)
    draws = DRAWS // 8 if size in MOST else DRAWS
    found = [case for case in (drawn(size, rng) for _ in range(draws)) if is_legal(case)]
    missing = [(case, pairs_of(case)) for case in found]
    seen, chosen = set(), []
    while missing:
        case, _ = max(missing, key=lambda one: len(one[1] - seen))
        chosen.append(case)
        seen |= pairs_of(case)
        missing = [(one, pairs) for one, pairs in missing if pairs - seen]
    return chosen[: MOST.get(size)]


def described():
    """What the letters stand for: {choice: values in words}."""
    return {name: ", ".join(map(repr, values)) for name, values in CHOICES.items()}


def row_of(case, size):
    places = [shapes(size).index((case["layout"], case["cp_size"]))]
    places += [values.index(case[name]) for name, values in CHOICES.items()]
    return "".join(LETTERS[place] for place in places)


def cases(size):
    """The kept cases for so many ranks."""
    kept = json.loads(FILE.read_text())
    assert kept["choices"] == described(), "drawn for other choices; run tests/helpers/drawn.py"
    found = []
    for row in kept.get(str(size), []):
        place, *places = map(LETTERS.index, row)
        layout, cp = shapes(size)[place]
        values = {
            name: choice[place]
            for (name, choice), place in zip(CHOICES.items(), places, strict=True)
        }
        found.append({"layout": layout, "cp_size": cp} | values)
    return found


def text_of(case):
    """A case as the name of a test: what is not at its first value."""
    layout = "x".join(map(str, (*case["layout"], case["cp_size"])))
    return " ".join(
        [layout]
        + [
            f"{name} {value}"
            for name, value in case.items()
            if name in CHOICES and value != CHOICES[name][0]
        ]
    )


def main():
    decoder.BLOCKS.update(ROWS)
    kept = {"choices": described()}
    kept |= {size: [row_of(case, size) for case in draw(size)] for size in (1, 2, 3, 4, 8)}
    FILE.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    main()
