"""`mpipar explain`: barriers in order, and closed forms of all that the step on shapes counts."""

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
from in_process import assert_refused, printed

from mpipar import models
from mpipar.comm.grid import Grid
from mpipar.comm.record import family
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import MemoryConfig, TrainConfig
from mpipar.study.explain import formulas
from mpipar.study.explain.layer_costs import KINDS, value
from mpipar.study.explain.predict import predict, unit_memory
from mpipar.study.plan.machine import load_machine
from mpipar.study.plan.model import step_of
from mpipar.train.build import configured_schedule


def configure(layout, schedule="1f1b", memory=None, **settings):
    """A resolved config of a small decoder, with settings of any section."""
    dp, pp, tp = layout
    config = Config(
        ModelConfig(layers=5, d_model=24, heads=4, ffn=21, seq_len=9, vocab_size=31),
        GridConfig(dp=dp, pp=pp, tp=tp, num_microbatches=4, schedule=schedule),
        TrainConfig(batch_size=16, bucket_bytes=2000),
    )
    parts = vars(resolve(config, dp * pp * tp)[0]) | {"memory": memory or MemoryConfig()}
    for name, given in settings.items():
        section = next(one for one in ("model", "grid", "train", "run") if name in vars(parts[one]))
        parts[section] = replace(parts[section], **{name: given})
    config = Config(**parts)
    return resolve(config, config.grid.num_ranks)[0] if "experts" in settings else config


RING = {"sequence_parallel": True, "tp_matmul": "ring"}
LLAMA = {
    "norm": "rms",
    "arch": "llama",
    "activation": "swiglu",
    "positions": "rope",
    "bias": "none",
    "kv_heads": 2,
}
GROUPED = LLAMA | {"heads": 8, "d_model": 20, "head_dim": 6, "bias": "qkv", "ffn": 21}
EXPERTS = {"experts": 4, "ep": 2, "seq_len": 24}
KEPT = MemoryConfig("block", zero=3, reshard_after_forward="no")
BLOCK, ZERO1, ZERO3 = MemoryConfig("block"), MemoryConfig(zero=1), MemoryConfig(zero=3)
# What changes a formula, two or three at a time: cuts, cp, recomputation, ZeRO, number
# formats, grouped heads, experts, islands, and stages that are held twice or without blocks.
CASES = [
    ((1, 1, 1), {}),
    ((1, 1, 2), {}),
    ((1, 1, 2), {"device": "cuda"}),  # whose kernels of attention store no scores
    ((1, 1, 4), {"ffn_cut": "gather"}),
    ((1, 1, 4), {"ffn_cut": "reduce", "memory": BLOCK}),
    ((2, 2, 2), {"ffn_cut": "gather", "schedule": "interleaved", "dtype": "bfloat16"}),
    ((1, 2, 2), {"ffn_cut": "reduce", "cp": 2, "cp_attention": "ring", "seq_len": 8}),
    ((1, 4, 1), {"schedule": "gpipe"}),
    ((1, 1, 2), {"sequence_parallel": True}),  # 9 tokens: those of the last rank are padded
    ((1, 1, 2), {"sequence_parallel": True, "memory": MemoryConfig("attention")}),
    ((1, 2, 4), {"sequence_parallel": True, "memory": BLOCK, "dtype": "bfloat16"}),
    ((2, 2, 2), {"sequence_parallel": True, "schedule": "zb-v", "memory": ZERO3}),
    ((1, 1, 4), RING | {"memory": BLOCK}),
    ((1, 2, 4), RING | {"norm": "rms"}),
    ((2, 2, 2), RING | {"memory": ZERO1, "dtype": "bfloat16"}),
    ((1, 2, 1), {"schedule": "dualpipe-v"}),
    ((1, 4, 1), {"schedule": "interleaved", "dtype": "bfloat16"}),
    ((1, 2, 2), {"schedule": "zb-v", "stage_layers": (0, 3, 2, 0)}),
    ((2, 2, 2), {"schedule": "interleaved", "stage_layers": (2, 0, 0, 3)}),
    ((1, 2, 2), {"schedule": "dualpipe-v", "stage_layers": (0, 5, 0, 0)}),
    ((1, 4, 1), {"stage_layers": (0, 5, 0, 0)}),
    ((1, 1, 1), {"cp": 4, "cp_attention": "ring", "seq_len": 24}),
    ((2, 1, 2), {"cp": 2, "cp_attention": "ring", "seq_len": 8, "memory": BLOCK}),
    ((1, 1, 1), {"cp": 4, "cp_attention": "gather", "seq_len": 8, "memory": BLOCK}),
    ((2, 1, 2), {"cp": 4, "cp_attention": "gather", "seq_len": 24, "dtype": "bfloat16"}),
    ((1, 1, 1), {"cp": 4, "cp_attention": "ulysses", "seq_len": 8, "memory": BLOCK}),
    ((2, 2, 2), {"cp": 2, "cp_attention": "ulysses", "seq_len": 24, "sequence_parallel": True}),
    ((2, 1, 2), {"cp": 2, "cp_attention": "ring", "seq_len": 8, "memory": KEPT} | RING),
    ((1, 1, 4), LLAMA | {"memory": BLOCK}),
    ((1, 1, 2), LLAMA | {"sequence_parallel": True, "cp": 2, "cp_attention": "ring", "seq_len": 8}),
    ((1, 1, 4), GROUPED),  # two ranks of tp hold the same head of keys and values
    ((1, 2, 4), GROUPED | {"cp": 2, "cp_attention": "ring", "seq_len": 24, "memory": BLOCK}),
    ((2, 1, 4), GROUPED | {"cp": 2, "cp_attention": "gather", "seq_len": 24, "memory": ZERO3}),
    ((1, 1, 1), GROUPED | {"cp": 2, "cp_attention": "ulysses", "seq_len": 24}),
    ((1, 1, 1), {"cp": 2, "cp_attention": "ulysses", "seq_len": 24, "device": "cuda"}),
    ((2, 2, 1), {"memory": ZERO1}),
    ((2, 2, 1), {"memory": KEPT, "dtype": "bfloat16"}),
    ((4, 1, 1), {"memory": ZERO3, "tied": False}),
    ((2, 2, 1), {"memory": ZERO3, "cp": 2, "cp_attention": "ring", "seq_len": 8}),
    ((4, 1, 1), {"islands": 1}),
    ((4, 2, 2), {"islands": 2}),
    ((4, 1, 1), {"islands": 2, "memory": ZERO1}),
    ((4, 2, 2), {"islands": 2, "memory": ZERO3}),
    ((2, 1, 2), {"optimizer": "muon"}),
    ((4, 1, 2), EXPERTS),
    ((4, 1, 2), EXPERTS | {"shared_expert_ffn": 10, "memory": ZERO1}),
    ((4, 2, 2), EXPERTS | {"expert_interval": 2, "memory": BLOCK}),
    ((2, 1, 2), EXPERTS | {"sequence_parallel": True, "cp": 2, "memory": ZERO3}),
]


def computed(text, sizes, q):
    """The value of a formula as `explain` prints it, such as 2(q-1)/q * B*T*D*e."""
    python = re.sub(r"(?<=[\d)])(?=[A-Za-z(])", "*", text)
    return eval(python, {}, {**sizes, "q": q})  # noqa: S307 - the program's own text


@pytest.mark.parametrize(("layout", "settings"), CASES, ids=str)
def test_formulas_give_what_the_step_on_shapes_counts(layout, settings):
    """Each payload, calls and bytes of every rank's step, and of one block and microbatch of it."""
    config = configure(layout, **settings)
    grid_sizes, schedule = config.grid, configured_schedule(config.grid)
    costs = formulas.units_of(config)
    split = models.layer_split(config, schedule)
    for world_rank in range(grid_sizes.num_ranks):
        grid, prediction = Grid.of(config.grid, world_rank), predict(config, world_rank)
        records = prediction.recorder.records
        for record in records:
            q = len(prediction.groups[record.axis])
            formula = formulas.payload(record, costs, q)
            if formula is None:
                assert record.phase == "sync" or record.axis not in ("tp", "pp", "cp", "kv"), record
            elif not record.operation.startswith("all_to_all"):
                assert formula[1] == record.payload_bytes, (formula[0], record)
                assert computed(formula[0], costs[1], q) == record.payload_bytes, record
        expected = formulas.expected(config, schedule, split, grid, prediction)
        axes = {one.axis for one in records}
        assert expected.keys() == axes - {"tie"}
        for axis, (text, calls, sent_text, sent) in expected.items():
            own = [one for one in records if one.axis == axis]
            assert calls in (None, len(own)), (axis, text, world_rank)
            if sent is not None:
                assert sent == sum(one.wire_bytes for one in own), (axis, sent_text, world_rank)
        for label, (text, size) in formulas.states(config, prediction).items():
            assert size in (None, prediction.peak_bytes.get(label, 0)), (label, text, world_rank)
        assert {axis for axis, one in expected.items() if one.sent is not None} >= axes & {
            "tp",
            "pp",
            "dp",
            "cp",
            "data",
        }
        if block := formulas.one_block(records):
            one = formulas.layer(config, grid_sizes.tp)
            assert (len(block), sum(each.wire_bytes for each in block)) == (one.calls, one.sent)


def test_a_predicted_step_has_its_share_of_a_meeting():
    """Also inside an island fewer ranks sum gradients."""
    machine, seconds = load_machine("cpu", 4), {}
    for interval in (1, 2, 1000):
        config = configure((4, 1, 1), islands=2)
        config = replace(config, train=replace(config.train, outer_interval=interval))
        seconds[interval] = step_of(config, machine).sums
    meeting = 2 * (seconds[1] - seconds[2])
    assert meeting > 0
    assert seconds[1000] == pytest.approx(seconds[1] - 0.999 * meeting)


def of_experts(ffn):
    """A step of one block with 16 tokens on each of 4 ranks; 2 of 8 experts are on each."""
    config = Config(
        ModelConfig(
            layers=1, d_model=34, heads=2, seq_len=16, vocab_size=16, experts=8, expert_ffn=ffn
        ),
        GridConfig(dp=4, ep=4, pp=1, tp=1, num_microbatches=1),
        TrainConfig(batch_size=4),
        RunConfig(dtype="float64"),
    )
    return resolve(config, 4)[0]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_worst_case_of_experts_has_all_rows_on_one_rank(rank):
    """128 rows are there, and 32 are the rank's if all experts are equally popular."""
    more = []
    for ffn in (512, 513):
        config = of_experts(ffn)
        usual, worst = (predict(config, rank, case) for case in (False, True))
        assert {name: worst.peak_bytes[name] for name in ("weights", "gradients")} == {
            name: usual.peak_bytes[name] for name in ("weights", "gradients")
        }
        more.append((worst.peak_bytes["stash"] - usual.peak_bytes["stash"]) / (8 * (128 - 32)))
    assert more[1] - more[0] == pytest.approx(4)  # h, a and their gradients are as wide as ffn


def test_recomputation_saves_only_what_lives_from_f_to_i():
    """On its last rank zb-h1 runs I soon after F, and postpones W, which reads the whole stash."""
    saved = {}
    for schedule, rank in itertools.product(("1f1b", "zb-h1"), (0, 3)):
        whole, again = (
            predict(configure((1, 4, 1), schedule, memory=memory, layers=8), rank).peak_bytes[
                "stash"
            ]
            for memory in (MemoryConfig(), MemoryConfig("block"))
        )
        saved[schedule, rank] = 1 - again / whole
    assert min(saved["1f1b", 0], saved["zb-h1", 0]) > 0.4, saved
    assert 0 <= saved["zb-h1", 3] < 0.1 < saved["1f1b", 3], saved


def test_every_barrier_is_listed_in_order_with_bytes_group_and_source():
    text = printed(
        "explain",
        "--layout",
        "dp=2,pp=2,tp=2",
        "--layers",
        2,
        "--num-microbatches",
        1,
        "--batch-size",
        2,
        "--rank",
        5,
        "--all",
    )
    lines = text.splitlines()
    assert lines[0].startswith("rank 5 of 8: pp1 dp0 tp1; stages 1: block 1, head, loss")
    listed = [line.split() for line in lines[3 : lines.index("by name, per step:") - 1]]
    moved = [[*row[:5], *row[6 if row[5] == "moved" else 8 :]] for row in listed[1:]]
    names = [(row[3], row[4], row[5]) for row in moved]
    assert names[:3] == [
        ("pp", "recv", "activations"),
        ("tp", "all_reduce", "block1.attn.proj"),
        ("tp", "all_reduce", "block1.ffn.down"),
    ]
    assert names[-1] == ("world", "all_reduce", "step.norm")
    assert listed[1][5] == "moved"
    assert listed[2][5:8] == ["partial", "->", "whole"]
    assert {one[-1] for one in listed[1:]} == {"x1"}
    row = moved[1]
    # B 1 row, T 64 tokens, D 128, 4 bytes; the tp group of rank 5 is ranks 4 and 5.
    assert row[6:12] == ["4,5", "float32", "32.0", "KiB", "B*T*D*e", "32.0"]
    for other, layer in ((listed[2], "attention"), (listed[3], "ffn")):
        assert other[-3].startswith(f"layers/{layer}.py:")
        assert other[-2].startswith("layers/parallel/row.py:")
    assert "m * (4L + 2)" in text
    calls, sent = [line.split()[3:] for line in lines if line.startswith("tp, one block ")]
    assert calls == ["calls", "4", "4"]
    assert sent == ["sent", "128.0", "KiB", "128.0", "KiB", "8(q-1)/q", "*", "B*T*D*e"]
    assert "FLOPs of products: F " in text


@pytest.mark.parametrize(("flags", "message"), [
    (["--layout", "tp=2", "--rank", "2"], "--rank 2: the layout has ranks 0 to 1"),
    (["--all-ranks", "--layout", "dp=257", "--batch-size", "1028"], "lists at most 256 ranks"),
    (["--layout", "pp=2", "--schedule", "auto"], "must be one of naive, gpipe,"),
    (["--layout", "tp=3"], "--heads 4"),
])  # fmt: skip
def test_mistakes_are_said(flags, message):
    assert_refused(2, [message], "explain", *flags)


def test_all_ranks_shows_who_holds_what():
    small = ["--layout", "pp=2,tp=2", "--layers", 3, "--d-model", 16, "--heads", 2]
    lines = printed("explain", *small, "--all-ranks").splitlines()
    assert lines[0].startswith("4 ranks; one step of 1f1b, ")
    assert "0: embedding, blocks 0-1  1/2 of " in lines[3]
    assert "1: block 2, head, loss    2/2 of " in lines[6]
    for rank, line in enumerate(lines[3:]):
        alone = printed("explain", *small, "--rank", rank)
        assert re.search(r"; together (.*)", alone)[1] == " ".join(line.split()[-2:])


def totals(text):
    """{what a barrier is: its calls} of the table by name."""
    block = re.search(r"^axis +barrier .*\n((?:.+\n)*)", text, re.MULTILINE)[1]
    lines = block.splitlines()
    return {tuple(line.split()[:5]): int(line.split()[5]) for line in lines}


def test_a_summary_has_totals_by_barrier_and_all_a_row_for_each_call():
    small = ["--layout", "dp=2,pp=2", "--layers", 2, "--d-model", 16, "--heads", 2]
    alone = [printed("explain", *small, "--rank", rank, "--all") for rank in range(4)]
    short = printed("explain", *small, "--rank", 3)
    assert "site" in alone[3]
    assert "site" not in short
    assert totals(short) == totals(alone[3])
    assert totals(short)["pp", "activations", "recv", "F", "float32"] == 4
    (folded,) = (line for line in alone[3].splitlines() if " recv " in line and " x" in line)
    assert folded.endswith("x4")
    together = totals(printed("explain", *small, "--all-ranks", "--all"))
    assert together == sum((Counter(totals(text)) for text in alone), Counter())
    assert "a single rank waits for no other" in printed("explain", "--all-ranks", "--all")


def test_a_rank_whose_stage_has_no_weights_is_explained_too():
    text = printed(
        "explain", "--layout", "pp=3", "--layers", 3, "--stage-layers", "2,0,1", "--rank", 1
    )
    assert text.startswith("rank 1 of 3: pp1; stages 1: no layers\n")
    assert "FLOPs of products: none\nmemory at the peak: weights 0 B," in text
    assert "m * 4 (sends and receives)" in text


def test_one_rank_has_no_barriers_but_memory_and_flops():
    text = printed("explain", "--memory-limit", 1000)
    assert "no barriers: a single rank waits for no other" in text
    assert "memory at the peak: " in text
    assert "that is more than --memory-limit 1000 (1000 B)" in text
    assert "more than" not in printed("explain", "--memory-limit", 10**9)


def test_the_copy_for_saving_in_the_background_is_predicted():
    small = ["--layers", 1, "--d-model", 8, "--heads", 2, "--dp", 2]
    plain, copied = (printed("explain", *small, *more) for more in ((), ("--save-async",)))
    assert "snapshot" not in plain
    assert re.search(
        r"memory at the peak: .*buffers [^,]+, scratch [^,]+, snapshot [\d.]+ KiB; "
        "together",
        copied.replace("\n  ", " "),
    )


# --- the barriers, FLOPs and bytes that layers declare are those that the step on shapes counts


ONE_STAGE = [case for case in CASES if case[0][1] == 1]
DENSE = [case for case in ONE_STAGE if "experts" not in case[1]]


def of_one_stage(layout, settings):
    """A config whose rank 0 has all units, and (how often a microbatch passes it, Cost) of each."""
    config = configure(layout, **{"dtype": "bfloat16"} | settings)
    units, sizes = formulas.units_of(config)
    costs = [(1, units.entry), (config.model.layers, units.block), (1, units.head)]
    return config, costs, sizes


@pytest.mark.parametrize(("layout", "settings"), ONE_STAGE, ids=str)
def test_layers_say_every_barrier_of_the_passes(layout, settings):
    """Name, operation, phase, calls and bytes of a microbatch, of each unit; and their formulas."""
    config, costs, sizes = of_one_stage(layout, settings)
    said, found, prediction = Counter(), Counter(), predict(config, 0)
    for times, cost in costs:
        for barrier in cost.barriers:
            q, operations = len(prediction.groups[barrier.axis]), KINDS[barrier.kind].operations
            sent = computed(formulas.sent_text([barrier]), sizes, q)
            assert sent == pytest.approx(barrier.sent(sizes, q), abs=q), barrier
            phases = [barrier.phase]
            if barrier.again and config.memory.recompute == "block":
                phases.append("recompute")
            for phase, operation in itertools.product(phases, operations if q > 1 else ()):
                key = barrier.axis, barrier.name, operation, phase, barrier.payload(sizes, q)
                said[key] += barrier.calls(q) // len(operations) * times
    for record in prediction.recorder.records:
        if record.mb == 1 and record.axis in ("tp", "cp", "kv"):
            name = family(record.name)
            found[record.axis, name, record.operation, record.phase, record.payload_bytes] += 1
    assert {of: calls for of, calls in said.items() if of[0] in ("tp", "cp", "kv")} == found


@pytest.mark.parametrize(("layout", "settings"), DENSE, ids=str)
def test_layers_say_what_each_unit_keeps(layout, settings):
    config, costs, sizes = of_one_stage(layout, settings)
    memory, stream = unit_memory(config), value(formulas.units_of(config)[0].stream, sizes)
    forms = formulas.kept_by_block(config).values()
    for field, (text, size) in zip(("stash_bytes", "kept_bytes"), forms, strict=True):
        assert set(memory[field][1:-1]) == {size}, (field, text)
        assert computed(text, sizes, 1) == size, text
    # There a unit's result belongs to it, here its input does.
    for place, moved in ((0, stream), (-1, -stream)):
        _, cost = costs[place]
        assert memory["stash_bytes"][place] == value(cost.stash, sizes) + moved
        assert memory["kept_bytes"][place] == value(cost.kept, sizes)


@pytest.mark.parametrize(("layout", "settings"), DENSE, ids=str)
def test_layers_say_the_flops_of_their_products(layout, settings):
    """A ring attends to half of what other ranks hold."""
    config, costs, sizes = of_one_stage(layout, settings)
    flops, attention = (
        sum(count * value(getattr(cost, kind), sizes) for count, cost in costs)
        for kind in ("flops", "attention")
    )
    m, cp = config.grid.num_microbatches, config.grid.cp
    counted, spared = predict(config, 0).flops, 0
    if config.grid.cp_attention == "ring":
        spared = attention * (cp - 1) / 2 / cp
    assert counted["W"] == m * (flops - attention)
    assert counted["F"] == m * (flops - spared)
