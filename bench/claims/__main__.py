"""What textbooks say about partitioned training, one table each, on one model.

    python -m bench.claims barriers [--json FILE]         # barriers and bytes of a step, by layout
    python -m bench.claims memory [--json FILE]           # bytes per rank against dp, pp and tp
    python -m bench.claims convolution [--json FILE]      # barriers of one layer: convnet, decoder
    python -m bench.claims scaling [--json FILE]          # FLOPs and bytes of a rank against tp
    python -m bench.claims context [--json FILE]          # pairs that ranks of a long row multiply
    mpiexec -n 4 python -m bench.claims hybrids [--json FILE]   # how four workers spend their time
    mpiexec -n 4 python -m bench.claims sharing [--json FILE]   # recomputation, ZeRO: their price
    mpiexec -n 4 python -m bench.claims limit [--json FILE]     # a model too large for one device
    mpiexec -n 2 python -m bench.claims shipped [--json FILE]   # published bugs, and who sees them
    mpiexec -n 2 python -m bench.claims curves [--json FILE]    # loss curves of bugs of experts
    mpiexec -n 4 python -m bench.claims moe [--json FILE]       # experts by ep and routing

Barriers and memory come from the shapes-only run; tests prove it equal to the records of real runs.
Hybrids, limit, moe, and the times of sharing are real training steps.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from math import prod

from bench.claims import experts, shipped, too_large
from bench.claims.layouts import MODEL, as_convnet, configure, layout_name
from bench.claims.scaling import scaling
from bench.claims.steps import STEPS, median_step, time_shares
from bench.program import Outcome, Program
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import PIECES_PER_RANK, token_pieces
from mpipar.comm.record import POINT_TO_POINT, Sums
from mpipar.commands.memory_limit import fullest
from mpipar.data.source import load_source
from mpipar.job.session import guard
from mpipar.ops.shape_array import MEMORY_LABELS
from mpipar.plan.predict import predict
from mpipar.trace import trace_file
from mpipar.trace.analysis import analyse

LAYOUTS = [
    {"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"pp": 2}, {"pp": 4}, {"pp": 8},
    {"dp": 2}, {"dp": 4}, {"dp": 8}, {"dp": 2, "pp": 2, "tp": 2},
]


def table_cases() -> list[tuple]:
    """(layout, suffix of its name, other settings) of each row of a table."""
    again = [({axis: size}, f" (recompute {what})", {"recompute": what})
             for axis, size in (("tp", 1), ("tp", 4), ("pp", 4)) for what in ("attention", "block")]
    return [(layout, "", {}) for layout in LAYOUTS] + [
        ({"tp": size}, " (sequence-parallel)", {"sequence_parallel": True}) for size in (2, 4, 8)
    ] + [({"cp": size}, f" ({method})", {"cp_attention": method})
         for size in (2, 4) for method in PIECES_PER_RANK] + again


def barriers() -> list[dict]:
    """Barriers (collectives) and messages per step and rank, and bytes sent, by layout."""
    rows = []
    cases = table_cases()
    cases += [({"tp": size}, " (ffn-cut gather)", {"ffn_cut": "gather"}) for size in (2, 4, 8)]
    for layout, variant, settings in cases:
        config = configure(layout, **settings)
        busiest = {"collectives": 0, "messages": 0, "sent": 0, "payload": 0}
        for rank in range(prod(layout.values())):
            totals = predict(config, rank).recorder.totals("operation")
            own = {
                "collectives": sum(counter.calls for (operation,), counter in totals.items()
                                   if operation not in POINT_TO_POINT),
                "messages": totals.get(("send",), Sums()).calls,
                "sent": sum(counter.wire_bytes for counter in totals.values()),
                "payload": sum(counter.payload_bytes for (operation,), counter in totals.items()
                               if operation != "recv"),
            }
            busiest = {key: max(busiest[key], own[key]) for key in busiest}
        rows.append({
            "layout": layout_name(layout) + variant,
            "collectives_per_step": busiest["collectives"],
            "messages_sent_per_step": busiest["messages"],
            "payload_MiB": busiest["payload"] / 2**20, "sent_MiB": busiest["sent"] / 2**20,
        })
    return rows


def memory() -> list[dict]:
    """Predicted peak bytes of the fullest rank, by what they are for."""
    rows = []
    for layout, variant, settings in table_cases():
        config = configure(layout, **settings)
        most = fullest(config)
        rows.append({"layout": layout_name(layout) + variant} | {
            f"{label}_MiB": most.peak_bytes.get(label, 0) / 2**20
            for label in (*MEMORY_LABELS, "scratch")
        } | {"peak_MiB": most.peak_total / 2**20})
    return rows


def context() -> list[dict]:
    """Pairs of a query and a key that it sees, by rank of cp: with the zig-zag, and with one run.

    The rank with most pairs keeps the others waiting. Of one run of tokens the last rank has
    2 - 1/cp times the mean.
    """
    rows, tokens = [], 4096
    for size, (method, pieces) in itertools.product((2, 4, 8), PIECES_PER_RANK.items()):
        if method == "gather":  # holds the same tokens as the ring
            continue
        held = [token_pieces(tokens, method, size, index) for index in range(size)]
        pairs = [sum(place + 1 for piece in pieces for place in range(piece.start, piece.stop))
                 for pieces in held]
        rows.append({
            "cp": size, "tokens_of_a_rank": "zig-zag" if pieces == 2 else "one run",
            "largest_pairs": max(pairs), "mean_pairs": sum(pairs) / size,
            "largest_over_mean": max(pairs) * size / sum(pairs)})
    return rows


LAYERS = [  # model, one of its layers, the name of that layer's records
    ("convnet", "2 convolutions", "block0."), ("decoder", "feed-forward", "block0.ffn."),
    ("decoder", "attention", "block0.attn."),
]
CUTS = {"gather": "output channels", "reduce": "input channels", "pair": "pair"}


def convolution() -> list[dict]:
    """Barriers of one layer, forward and backward of a microbatch, by cut and tp; bytes per rank.

    The convnet is that of `as_convnet`. Attention is always cut as a pair.
    """
    rows = []
    for model, layer, prefix in LAYERS:
        for cut, size in itertools.product(CUTS, (2, 4, 8)):
            if layer == "attention" and cut != "pair":
                continue
            config = configure({"tp": size}, ffn_cut=cut)
            if model == "convnet":
                config = as_convnet(config)
            records = [one for one in predict(config, 0).recorder.records
                       if one.name.startswith(prefix) and one.mb == 0]
            rows.append({
                "layer": f"{model}: {layer}", "cut": CUTS[cut], "tp": size,
                "forward": ", ".join(one.operation for one in records if one.phase == "F"),
                "backward": ", ".join(one.operation for one in records if one.phase == "I"),
                "barriers": len(records),
                "payload_MiB": sum(one.payload_bytes for one in records) / 2**20,
                "sent_MiB": sum(one.wire_bytes for one in records) / 2**20,
            })
    return rows


HYBRIDS = [
    ({"pp": 4}, 8, "naive"), ({"pp": 4}, 8, "gpipe"), ({"pp": 4}, 8, "1f1b"),
    ({"pp": 4}, 8, "zb-h1"), ({"pp": 2, "dp": 2}, 8, "1f1b"), ({"pp": 2, "tp": 2}, 8, "1f1b"),
    ({"dp": 4}, 8, "1f1b"), ({"tp": 4}, 8, "1f1b"),
]


def hybrids(world) -> list[dict] | None:
    """Measured steps of four workers: how they spend their time, and tokens/s, from traced runs.

    useful: compute spans less the communication inside them. waiting: blocked until the last rank
    arrived. transfer: blocked from there to the end. idle: the rest. All are shares of all ranks'
    time. Rows on world rank 0, None elsewhere.
    Comm: everything of a few training steps per layout.
    """
    rows = []
    tokens = load_source((), 256).tokens
    for layout, num_microbatches, schedule in HYBRIDS:
        config = configure(layout, num_microbatches, schedule)
        config = replace(config, run=replace(config.run, trace=f"2:{STEPS}"))
        with tempfile.TemporaryDirectory() as own:
            folder = broadcast_text(world, own)
            seconds = median_step(config, tokens, world, folder)
            all_seconds = gather_facts(world, seconds)  # and every rank has written its file
            if all_seconds is None:
                continue
            step_s = max(all_seconds)
            rows.append({
                "layout": layout_name(layout), "schedule": schedule if "pp" in layout else "-",
                **time_shares(analyse(trace_file.read(folder))), "step_ms": step_s * 1e3,
                "tokens_per_s": config.train.batch_size * config.model.seq_len / step_s})
    return rows if world.rank == 0 else None


PIECES = {"zero": 3, "zero_grads": "sharded"}
SHARING = [
    ({"dp": 4}, {}), ({"dp": 4}, {"recompute": "block"}), ({"dp": 4}, {"zero": 1}),
    ({"dp": 4}, {"zero": 3}), ({"dp": 4}, {"zero": 3, "zero_keep": "stage"}), ({"dp": 4}, PIECES),
    ({"cp": 4}, {}), ({"cp": 4}, PIECES | {"recompute": "block"}),
]


def sharing(world) -> list[dict] | None:
    """What a rank of four keeps, by what it makes again and shares out, and the price of that.

    Bytes, barriers and messages are predicted, of one step and rank. step_ms is measured. Rows on
    world rank 0, None elsewhere.
    Comm: everything of a few training steps per row.
    """
    rows, tokens = [], load_source((), 256).tokens
    for layout, settings in SHARING:
        config = configure(layout, **settings)
        with tempfile.TemporaryDirectory() as own:
            seconds = median_step(config, tokens, world, broadcast_text(world, own))
            all_seconds = gather_facts(world, seconds)
        if all_seconds is None:
            continue
        found = predict(config, 0)
        bytes_of = {f"{label}_MiB": found.peak_bytes.get(label, 0) / 2**20
                    for label in ("weights", "gradients", "optimizer", "stash")}
        words = [f"{name.replace('_', '-')} {value}" for name, value in settings.items()]
        rows.append({
            "layout": layout_name(layout), "with": ", ".join(words) or "-", **bytes_of,
            "peak_MiB": found.peak_total / 2**20, "barriers": len(found.recorder.records),
            "sent_MiB": sum(one.wire_bytes for one in found.recorder.records) / 2**20,
            "step_ms": max(all_seconds) * 1e3})
    return rows if world.rank == 0 else None


COMPUTED = {"barriers": barriers, "memory": memory, "convolution": convolution, "context": context,
            "scaling": scaling}
MEASURED = {"hybrids": hybrids, "sharing": sharing, "limit": too_large.too_large,
            "shipped": shipped.shipped, "curves": shipped.curves, "moe": experts.experts}
FACTS = {"limit": too_large.MODEL, "moe": experts.MODEL,
         **dict.fromkeys(("shipped", "curves"), shipped.MODEL | shipped.TRAINING)}


def make_table(args, session) -> Outcome | int:
    """Measure or compute the table that the first word names."""
    if args.table in COMPUTED:
        rows = COMPUTED[args.table]()
    elif (rows := MEASURED[args.table](session.world)) is None:
        return 0
    facts = FACTS.get(args.table, {"rows_per_step": 16, "microbatches": 8, **MODEL})
    return Outcome(rows, facts, variant=args.table)


main = Program(
    "claims", __doc__, make_table, together=lambda args: args.table in MEASURED,
    add=lambda parser: parser.add_argument("table", choices=(*COMPUTED, *MEASURED)))


if __name__ == "__main__":
    guard(main)
