"""`mpipar explain`: the barriers of one rank's training step; no MPI.

It runs the real step on shapes and prints what the code would do, beside the closed forms: the
barriers by name, with `--all` every call in its order. With `--all-ranks` it does so for every
rank, and prints what each holds.
"""

import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from mpipar import models
from mpipar.comm.grid import AXES, Grid
from mpipar.comm.record import state_change
from mpipar.commands.command import OF_A_STEP, Command, Context
from mpipar.config.grid import axes_text
from mpipar.config.setting import setting, switch
from mpipar.config.text import counted
from mpipar.errors import EXIT_OK, UsageError, broken
from mpipar.models.decoder import ENTRY
from mpipar.ops.shape_ops import labels_of
from mpipar.run.console.tables import (
    WIDTH,
    barriers,
    describe_stage,
    holding,
    holdings,
    nbytes,
    short_count,
    table,
    table_with_words,
)
from mpipar.run.data.rows import rows_per_microbatch
from mpipar.run.resolve import resolve
from mpipar.study.explain import formulas
from mpipar.study.explain.predict import predict, unit_memory
from mpipar.study.plan.machine import load_machine
from mpipar.study.plan.model import step_of
from mpipar.study.plan.report import PARTS
from mpipar.train.build import configured_schedule

FORMS = """\
calls and bytes sent per step, and for one block and microbatch, beside the closed forms
(L blocks here, R of them recomputed, m microbatches, q ranks in the group):"""
MOST_RANKS = 1 << 17  # of a layout: beyond it the arithmetic of groups takes minutes
MOST_LISTED = 256  # with --all-ranks: the step of each rank takes up to a second


@dataclass(frozen=True)
class Arguments:
    """What the command takes besides the flags of a configuration."""

    rank: int | None = setting(None, "world rank to explain (default 0)", metavar="R")
    all_ranks: bool = switch(
        "a row for each rank: which layers, shard, parameters and memory it holds"
    )
    all: bool = switch(
        "also every call in its order, those of the microbatches in one row; with --all-ranks"
        " the barriers of all ranks together"
    )
    machine: str | None = setting(
        None,
        "predict the time of a step on a machine of mpipar plan, or on one of this form in a file",
        metavar="NAME|FILE",
    )


def run(context: Context) -> int:
    """Print the barriers of one rank, or what all ranks hold; the layout sets their number."""
    args, parsed = context.args, context.parsed
    config, machine = configured(parsed, args)
    schedule = configured_schedule(config.grid)
    if args.all_ranks:
        predictions = [predict(config, world_rank) for world_rank in range(config.grid.num_ranks)]
        print(f"{counted(len(predictions), 'rank')}; {step_words(config, schedule)}\n")
        print(holdings([holding(config, schedule, one) for one in predictions]))
        if args.all:
            print("\nbarriers by name, per step, summed over ranks:")
            print(barriers([counters(one) for one in predictions], 1, timed=False))
    else:
        print_rank(config, schedule, predict(config, args.rank or 0), args.all)
    if machine:
        step = step_of(config, machine)
        parts = [f"{s * 1e3:.2f} {PARTS[name]}" for name, s in step._asdict().items() if s > 0]
        print(
            textwrap.fill(
                f"predicted step on {machine.name}: {step.total * 1e3:.2f} ms ="
                f" {' + '.join(parts)}",
                WIDTH,
                subsequent_indent="  ",
            )
        )
        if config.memory.zero == 0 and config.grid.island_dp * config.grid.cp > 1:
            sharded = replace(config, memory=replace(config.memory, zero=1))
            print(f"with --zero 1: {step_of(sharded, machine).total * 1e3:.2f} ms")
    return EXIT_OK


def of_named_axes(parsed) -> tuple:
    """Return (configuration, number of ranks), with 1 for axes that are not given."""
    given = parsed.config.grid
    grid = replace(given, **{axis: 1 for axis in AXES if getattr(given, axis) is None})
    return replace(parsed, config=replace(parsed.config, grid=grid)), grid.num_ranks


def configured(parsed, args):
    """Return (resolved configuration, the Machine of --machine or None).

    It prints the notes that `train` would print for these flags. Raises UsageError.
    """
    parsed, world_size = of_named_axes(parsed)
    if world_size > MOST_RANKS:
        raise UsageError(
            f"--layout {axes_text(vars(parsed.config.grid))}: has {world_size:,} ranks; at most"
            f" {MOST_RANKS:,} can be explained"
        )
    config, notes = resolve(parsed, world_size)
    problems = broken(
        (
            args.rank is not None and not 0 <= args.rank < world_size,
            f"--rank {args.rank}: the layout has ranks 0 to {world_size - 1}",
        ),
        (
            args.all_ranks and args.rank is not None,
            f"--all-ranks and --rank {args.rank}: give one of them",
        ),
        (
            args.all_ranks and world_size > MOST_LISTED,
            f"--all-ranks: lists at most {MOST_LISTED} ranks, not {world_size:,}; use --rank R",
        ),
    )
    if problems:
        raise UsageError(problems)
    if notes:
        print("\n".join([*notes, ""]))
    return config, load_machine(args.machine, world_size) if args.machine is not None else None


def counters(prediction) -> list[tuple]:
    """Return what a rank's operations sum up to, for `barriers`."""
    return [(*key, *sums) for key, sums in prediction.recorder.counters.items()]


def step_words(config, schedule) -> str:
    """Return a description of the explained step."""
    return (
        f"one step of {schedule.name}, "
        f"{counted(config.grid.num_microbatches, 'microbatch')} of "
        f"{counted(rows_per_microbatch(config), 'row')}, {config.run.dtype}"
    )


def print_rank(config, schedule, prediction, every_call: bool) -> None:
    """Print one rank's barriers, FLOPs and memory; with `every_call` all calls in their order."""
    grid = Grid.of(config.grid, prediction.world_rank)
    split = models.layer_split(config, schedule)
    stages = [
        describe_stage(one, split, ENTRY) for one in schedule.stages_by_rank[grid.group_rank("pp")]
    ]
    print(
        f"rank {grid.world_rank} of {grid.world_size}: {grid.describe()};"
        f" stages {'; '.join(stages)}\n{step_words(config, schedule)}\n"
    )
    if not prediction.recorder.records:
        print(
            "no barriers: a single rank waits for no other; add, for example, --layout"
            " dp=2,pp=2,tp=2"
        )
    else:
        if every_call:
            print(f"{in_order(prediction, config)}\n")
        print(f"by name, per step:\n{barriers([counters(prediction)], 1, timed=False)}\n\n{FORMS}")
        print(closed_forms(prediction, config, schedule, split, grid))
    if prediction.gram_sums is not None:
        print(f"\n{muon_forms(prediction)}")
    print("\nparameters, and what a block keeps of one microbatch, beside the closed forms:")
    print(f"{memory_forms(prediction, config)}\n\n{formulas.legend(config)}")
    flops = [f"{phase} {short_count(count)}" for phase, count in prediction.flops.items()]
    print(f"\nFLOPs of products: {', '.join(flops) or 'none'}")
    parts = ", ".join(
        f"{label} {nbytes(prediction.peak_bytes.get(label, 0))}"
        for label in labels_of([prediction.peak_bytes])
    )
    print(
        textwrap.fill(
            f"memory at the peak: {parts}; together {nbytes(prediction.peak_total)}",
            WIDTH,
            subsequent_indent="  ",
        )
    )
    if len(prediction.groups.get("expert", ())) > 1:
        worst = predict(config, prediction.world_rank, worst_case=True)
        print(
            textwrap.fill(
                f"if all tokens of the {config.grid.ep} ranks go to experts of this one: stash "
                f"{nbytes(worst.peak_bytes.get('stash', 0))}; together {nbytes(worst.peak_total)}",
                WIDTH,
            )
        )
        print(textwrap.fill(formulas.expert_rows(config), WIDTH))
    if (limit := config.run.memory_limit) is not None and prediction.peak_total > limit:
        print(f"that is more than --memory-limit {limit} ({nbytes(limit)})")


def in_order(prediction, config) -> str:
    """Return one row per call, in the rank's order; see record.py for the columns.

    Calls that differ only in their microbatch are one row, where the first of them is made.
    """
    names = "phase stage axis operation turns name ranks dtype payload formula sent factor site cut"
    rows = [("", *names.split(), "calls")]
    costs = formulas.units_of(config)
    calls = Counter(
        record._replace(mb=-1, seq=0, tag=-1, posted_ns=0, waited_ns=0, done_ns=0, step=0)
        for record in prediction.recorder.records
    )
    for record, count in calls.items():
        ranks = prediction.groups[record.axis]
        shown = ",".join(map(str, ranks))
        if record.peer >= 0:
            shown = f"{'to' if record.operation == 'send' else 'from'} {ranks[record.peer]}"
        formula = formulas.payload(record, costs, len(ranks)) or ("",)
        rows.append(
            (
                len(rows),
                record.phase,
                record.stage,
                record.axis,
                record.operation,
                state_change(record.operation),
                record.name,
                shown,
                record.dtype,
                nbytes(record.payload_bytes),
                formula[0],
                nbytes(record.wire_bytes),
                formulas.sent(record),
                record.site.removeprefix("mpipar/"),
                record.cut.removeprefix("mpipar/"),
                f"x{count}",
            )
        )
    return table(rows, left=9)


def closed_forms(prediction, config, schedule, split, grid) -> str:
    """Return counted and expected calls and bytes sent, by axis, and over tp for one block."""
    records = prediction.recorder.records
    expected = formulas.expected(config, schedule, split, grid, prediction)
    groups = defaultdict(list)
    for record in records:
        groups[record.axis].append(record)
    if block := formulas.one_block(records):
        groups["tp, one block"] = block
        index = int(block[0].name.split(".")[0].removeprefix("block"))
        expected["tp, one block"] = formulas.layer(config, grid.size("tp"), index)
    rows = [("axis", "of a step", "counted", "closed form", "")]
    for axis, own in groups.items():
        formula, count, text, size = expected.get(axis, formulas.Expected())
        sent = nbytes(sum(one.wire_bytes for one in own))
        rows += [
            (axis, "calls", len(own), "" if count is None else count, formula),
            (axis, "sent", sent, "" if size is None else nbytes(size), text),
        ]
    return table_with_words(rows, left=2)


def memory_forms(prediction, config) -> str:
    """Return counted and expected bytes of weights, gradients, optimizer, and a block's stash."""
    forms, parts = formulas.states(config, prediction), formulas.kept_by_block(config)
    one = unit_memory(replace(config, model=replace(config.model, layers=1)))
    kept = (one[field][1] for field in ("stash_bytes", "kept_bytes"))
    found = prediction.peak_bytes | dict(zip(parts, kept, strict=True))
    rows = [
        (label, nbytes(found.get(label, 0)), "" if size is None else nbytes(size), text)
        for label, (text, size) in (forms | parts).items()
    ]
    return table_with_words([("", "bytes", "closed form", ""), *rows])


def muon_forms(prediction) -> str:
    """Return what Muon sends and computes, beside what it would if no matrix were gathered."""
    own = [one for one in prediction.recorder.records if one.name.startswith("muon.")]
    sent = sum(one.wire_bytes for one in own)
    ways = (
        ("each matrix whole at a home", len(own), sent, prediction.flops.get("opt", 0)),
        ("Gram matrices of parts summed (not built)", *prediction.gram_sums),
    )
    return table(
        [
            ("muon, per step", "calls", "sent", "FLOPs"),
            *((way, calls, nbytes(sent), short_count(flops)) for way, calls, sent, flops in ways),
        ],
        left=1,
    )


COMMAND = Command(
    run,
    "[flags]",
    Arguments,
    fields=(OF_A_STEP | {"save_async"})
    - {  # its copy of the state
        "hang_warn",
        "hang_stop",
        "lr",
        "data",
        "seed",
        "check_comm",
        "all_reduce",
        "loss_scale",
    },
)
