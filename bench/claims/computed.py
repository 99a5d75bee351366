"""The tables of bench.claims that shapes and formulas give, without a training step.

Also here: the model of bench.claims in any layout; layouts in words.
"""

from __future__ import annotations

import itertools
from math import prod

from mpipar.comm.grid import PIECES_PER_RANK
from mpipar.comm.record import POINT_TO_POINT, Sums
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.ops.shape_array import MEMORY_LABELS
from mpipar.study.explain.formulas import units_of
from mpipar.study.explain.layer_costs import value
from mpipar.study.explain.predict import fullest, predict

LAYOUTS = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 4},
    {"tp": 8},
    {"pp": 2},
    {"pp": 4},
    {"pp": 8},
    {"dp": 2},
    {"dp": 4},
    {"dp": 8},
    {"dp": 2, "pp": 2, "tp": 2},
]


def table_cases() -> list[tuple]:
    """Return (layout, suffix of its name, other settings) of each row of a table."""
    again = [
        ({axis: size}, f" (recompute {what})", {"recompute": what})
        for axis, size in (("tp", 1), ("tp", 4), ("pp", 4))
        for what in ("attention", "block")
    ]
    return (
        [(layout, "", {}) for layout in LAYOUTS]
        + [
            ({"tp": size}, " (sequence-parallel)", {"sequence_parallel": True})
            for size in (2, 4, 8)
        ]
        + [
            ({"cp": size}, f" ({method})", {"cp_attention": method})
            for size in (2, 4)
            for method in PIECES_PER_RANK
        ]
        + again
    )


def barriers() -> list[dict]:
    """Return barriers (collectives) and messages per step and rank, and bytes sent, by layout."""
    rows = []
    cases = table_cases()
    cases += [({"tp": size}, " (ffn-cut gather)", {"ffn_cut": "gather"}) for size in (2, 4, 8)]
    for layout, variant, settings in cases:
        config = configure(layout, **settings)
        busiest = {"collectives": 0, "messages": 0, "sent": 0, "payload": 0}
        for rank in range(prod(layout.values())):
            totals = predict(config, rank).recorder.totals("operation")
            own = {
                "collectives": sum(
                    counter.calls
                    for (operation,), counter in totals.items()
                    if operation not in POINT_TO_POINT
                ),
                "messages": totals.get(("send",), Sums()).calls,
                "sent": sum(counter.wire_bytes for counter in totals.values()),
                "payload": sum(
                    counter.payload_bytes
                    for (operation,), counter in totals.items()
                    if operation != "recv"
                ),
            }
            busiest = {key: max(busiest[key], own[key]) for key in busiest}
        rows.append(
            {
                "layout": layout_name(layout) + variant,
                "collectives_per_step": busiest["collectives"],
                "messages_sent_per_step": busiest["messages"],
                "payload_MiB": busiest["payload"] / 2**20,
                "sent_MiB": busiest["sent"] / 2**20,
            }
        )
    return rows


def memory() -> list[dict]:
    """Return predicted peak bytes of the fullest rank, by purpose."""
    rows = []
    for layout, variant, settings in table_cases():
        config = configure(layout, **settings)
        most = fullest(config)
        rows.append(
            {"layout": layout_name(layout) + variant}
            | {
                f"{label}_MiB": most.peak_bytes.get(label, 0) / 2**20
                for label in (*MEMORY_LABELS, "scratch")
            }
            | {"peak_MiB": most.peak_total / 2**20}
        )
    return rows


LAYERS = {"feed-forward": "block0.ffn.", "attention": "block0.attn."}  # and what begins its names
CUTS = {"gather": "output channels", "reduce": "input channels", "pair": "pair"}


def cuts() -> list[dict]:
    """Return barriers of one layer, forward and backward of a microbatch; bytes per rank.

    There is a row for each cut and tp. Attention is always cut as a pair.
    """
    rows = []
    for layer, prefix in LAYERS.items():
        for cut, size in itertools.product(CUTS, (2, 4, 8)):
            if layer == "attention" and cut != "pair":
                continue
            records = [
                one
                for one in predict(configure({"tp": size}, ffn_cut=cut), 0).recorder.records
                if one.name.startswith(prefix) and one.mb == 0
            ]
            rows.append(
                {
                    "layer": layer,
                    "cut": CUTS[cut],
                    "tp": size,
                    "forward": ", ".join(one.operation for one in records if one.phase == "F"),
                    "backward": ", ".join(one.operation for one in records if one.phase == "I"),
                    "barriers": len(records),
                    "payload_MiB": sum(one.payload_bytes for one in records) / 2**20,
                    "sent_MiB": sum(one.wire_bytes for one in records) / 2**20,
                }
            )
    return rows


SIZES = (1, 2, 4, 8)
PASSES = 3  # forward, input gradient and weight gradient take the FLOPs of a forward each


def scaling() -> list[dict]:
    """Return what tensor parallelism divides by its ranks, and what not, as a block declares.

    FLOPs, memory, barriers and bytes are of one rank and microbatch, both passes, against tp.
    times_ranks: the FLOPs of all ranks, as a multiple of those of one rank alone. flop_per_byte:
    what a rank computes for each byte that it sends.
    """
    rows, alone = [], 0
    for size in SIZES:
        units, letters = units_of(configure({"tp": size}))
        cost = units.block
        flops = PASSES * value(cost.flops, letters)
        alone = alone or flops
        barriers = [one for one in cost.barriers if one.axis == "tp" and size > 1]
        sent = sum(one.sent(letters, size) for one in barriers)
        rows.append(
            {
                "part": "one block",
                "tp": size,
                "MFLOP": flops / 1e6,
                "times_ranks": size * flops / alone,
                "weights_KiB": value(cost.weights, letters) * letters["e"] / 1024,
                "stash_KiB": value(cost.stash, letters) / 1024,
                "barriers": sum(one.calls(size) for one in barriers),
                "sent_KiB": sent / 1024,
                "flop_per_byte": flops / sent if sent else "-",
            }
        )
    return rows


MODEL = {"layers": 8, "d_model": 256, "heads": 8, "seq_len": 128}


def configure(layout: dict, num_microbatches: int = 8, schedule: str = "1f1b", **settings):
    """Return the claims' model in a layout, 16 rows per step, with some other settings."""
    values = {"dp": 1, "pp": 1, "tp": 1, "batch_size": 16} | MODEL | layout | settings
    values |= {"num_microbatches": num_microbatches // values["dp"], "schedule": schedule}
    return resolve(build(values), prod(layout.values()))[0]


def layout_name(layout: dict) -> str:
    """Return the axes with their sizes, as in "pp 2 x dp 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())
