"""Completes a Config for a number of ranks, and reports all its problems at once.

First the table of illegal combinations of settings: a row per reason, with the way out. Its rows
depend on settings alone; `run.resolve` adds those of schedules and holds the whole table. Values
that are wrong by themselves are refused by a field's bounds, and settings that belong to another
choice by its `only`: see `config.setting`.

Options of an axis that has one rank are legal, such as --sequence-parallel with --tp 1: a group of
one sends nothing, and so the same flags fit every layout.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace

from mpipar.comm.grid import AXES, PIECES_PER_RANK
from mpipar.config.grid import AUTO, GridConfig, cuts_heads, matching
from mpipar.config.model import ModelConfig
from mpipar.config.presets import PRESETS
from mpipar.config.run import NEVER, RunConfig, trace_steps
from mpipar.config.sections import Config, in_force, named, settings
from mpipar.config.setting import field_problem
from mpipar.config.text import counted, shown
from mpipar.errors import UsageError, UserError, combine
from mpipar.ops import KERNELS

MOST_WORK = 1 << 15  # forward passes of blocks per step on one pipeline rank
PLAIN = re.compile(r"[\w.,:/+=-]+")  # a value that needs no quotes in a sentence


@dataclass(frozen=True)
class Rule:
    """One kind of illegal combination.

    name: of this row. fields: the settings it relates; a refusal begins with them and their values.
    broken: whether values (see `values_of`) are illegal. sentence: why, and what to type instead;
    it may hold {name} of a value.
    complete: whether it judges the configuration after layout and microbatches are chosen;
    otherwise it judges what was typed.
    """

    name: str
    fields: tuple[str, ...]
    broken: Callable[[SimpleNamespace], object]  # true or not
    sentence: str
    complete: bool = False

    def problem(self, values: SimpleNamespace) -> str:
        """Return what is wrong, why, and what to type instead."""
        return f"{subject(self.fields, values)}: {self.sentence.format_map(vars(values))}"


def values_of(config: Config, **facts) -> SimpleNamespace:
    """Return every setting in force of a Config by its name, and what else rules judge by.

    facts: `ranks`, their number. free: the axes that were not given. csv: the schedule in the file
    of --schedule-csv. machine, chooses_layout: --machine, and whether --layout is auto.
    """
    usual = {
        "ranks": None,
        "free": frozenset(),
        "csv": None,
        "machine": None,
        "chooses_layout": False,
        "axes_product": config.grid.num_ranks,
    }
    return SimpleNamespace(**in_force(config), **usual | facts)


def typed(value) -> str:
    """Return a value as the user types it."""
    if isinstance(value, tuple):
        return ",".join(map(typed, value))
    text = repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else shown(text)


def subject(names: tuple[str, ...], values: SimpleNamespace) -> str:
    """Return the settings of a rule with their values, without those that were not given."""
    told = {name: getattr(values, name) for name in names}
    ranks = told.pop("ranks", None)
    words = [
        named(name) if value is True else f"{named(name)} {typed(value)}"
        for name, value in told.items()
        if value not in (None, (), False) or type(value) is int
    ]
    return " with ".join(words) + (f" on {counted(ranks, 'rank')}" if ranks else "")


def kv_heads(v) -> int:
    """Return the number of key/value heads, of values or of a ModelConfig."""
    return v.kv_heads or v.heads


def island_data(v) -> int:
    """Return the ranks of the data group: of dp x cp, or of an island's part of it."""
    return v.dp // (v.islands or 1) * v.cp


def is_no_product(v) -> bool:
    """Return whether the given axes can't make up the number of ranks."""
    total = math.prod(getattr(v, axis) for axis in AXES if axis not in v.free)
    return v.ranks % total > 0 or (not v.free and total != v.ranks)


def fits_nowhere(v) -> bool:
    """Return whether no layout has the given axes, though each of them is legal by itself."""
    legal = (
        not is_no_product(v)
        and (v.pp or 1) <= v.layers
        and cuts_heads(v.tp or 1, v.heads, kv_heads(v))
    )
    return legal and not matching((v.dp, v.pp, v.tp), v.ranks, v.layers, v.heads, kv_heads(v), v.cp)


RULES = (
    # the model
    Rule(
        "head width",
        ("heads", "d_model"),
        lambda v: v.head_dim is None and v.d_model % v.heads > 0,
        "the heads divide the width D into equal parts; use a --heads that divides {d_model}",
    ),
    Rule(
        "rotated pairs",
        ("positions", "d_model", "heads"),
        lambda v: (
            v.positions == "rope"
            and (v.head_dim or v.d_model // v.heads) % 2 > 0
            and not (v.head_dim is None and v.d_model % v.heads)
        ),
        "rotary positions rotate the features of a head in pairs, and their number is odd; use a"
        " --heads that makes --d-model / --heads even",
    ),
    Rule(
        "groups of heads",
        ("kv_heads", "heads"),
        lambda v: v.heads % kv_heads(v) > 0,
        "each key/value head serves equally many query heads; use a --kv-heads that divides"
        " {heads}",
    ),
    Rule(
        "heads of GPT-2",
        ("kv_heads", "heads", "arch"),
        lambda v: v.arch == "gpt2" and kv_heads(v) != v.heads,
        "gpt2 stores queries, keys and values as equal parts of one weight matrix; use"
        " --arch llama, or leave --kv-heads out",
    ),
    Rule(
        "gate of GPT-2",
        ("activation", "arch"),
        lambda v: v.activation == "swiglu" and v.arch == "gpt2",
        "the weights of gpt2 have no matrix for a gate; use --arch llama, or --activation gelu",
    ),
    Rule(
        "cut of a gate",
        ("ffn_cut", "activation"),
        lambda v: v.ffn_cut in ("gather", "reduce") and v.activation == "swiglu",
        "gather and reduce each cut a single product, and swiglu's up-projection has two; use"
        " --ffn-cut pair",
    ),
    Rule(
        "cut of tokens",
        ("ffn_cut", "sequence_parallel"),
        lambda v: v.ffn_cut != "pair" and v.sequence_parallel,
        "{ffn_cut} keeps all tokens on every rank, and sequence parallelism does not; use"
        " --ffn-cut pair, or leave --sequence-parallel out",
    ),
    Rule(
        "ring of pieces",
        ("tp_matmul", "sequence_parallel"),
        lambda v: v.tp_matmul == "ring" and not v.sequence_parallel,
        "ring splits the barriers of sequence parallelism into pieces, and there are none; add"
        " --sequence-parallel, or use --tp-matmul plain",
    ),
    Rule(
        "slowed rotations",
        ("rope_scaling",),
        lambda v: (
            v.rope_scaling
            and not (len(v.rope_scaling) == 4 and v.rope_scaling[1] < v.rope_scaling[2])
        ),
        "it takes four numbers: factor, low and high frequency factor, original length, with low"
        " below high; write rope-scaling = [8,1,4,8192], or leave it out",
    ),
    Rule(
        "longest row",
        ("seq_len", "max_positions"),
        lambda v: v.seq_len > (v.max_positions or v.seq_len),
        "a row cannot be longer than the longest one that the positions are made for; use at most"
        " --seq-len {max_positions}",
    ),
    Rule(
        "experts of a token",
        ("experts_per_token", "experts"),
        lambda v: v.experts_per_token > v.experts,
        "a token is routed to distinct experts, and there are fewer; use at most"
        " --experts-per-token {experts}",
    ),
    Rule(
        "blocks of experts",
        ("expert_interval", "layers"),
        lambda v: v.expert_interval > v.layers,
        "one block in so many has experts, and there are fewer blocks; use at least"
        " --layers {expert_interval}",
    ),
    # the layout
    Rule(
        "number of ranks",
        ("dp", "pp", "tp", "cp", "ranks"),
        is_no_product,
        "the product of the axes must be the number of ranks; start mpiexec -n {axes_product}, or"
        " leave an axis out, which is then chosen",
    ),
    Rule(
        "heads of a rank",
        ("heads", "tp", "ranks"),
        lambda v: v.tp and v.heads % v.tp > 0,
        "tensor-parallel ranks hold equal numbers of heads; use a --tp that divides {heads}",
    ),
    Rule(
        "kv heads of a rank",
        ("kv_heads", "heads", "tp", "ranks"),
        lambda v: v.tp and v.heads % v.tp == 0 and not cuts_heads(v.tp, v.heads, kv_heads(v)),
        "tensor-parallel ranks hold whole key/value heads: equally many each, or copies of one; use"
        " a --tp that divides {kv_heads}, or a multiple of it that divides {heads}",
    ),
    Rule(
        "blocks of a rank",
        ("pp", "layers", "ranks"),
        lambda v: v.pp and v.pp > v.layers,
        "each pipeline rank needs at least one block; use at most --pp {layers}",
    ),
    Rule(
        "no layout",
        ("dp", "pp", "tp", "cp", "ranks"),
        fits_nowhere,
        "no layout with these axes fits the model's blocks and heads; leave an axis out, which is"
        " then chosen, or start another number of ranks",
    ),
    Rule(
        "order of axes",
        ("rank_order",),
        lambda v: sorted(v.rank_order.split(",")) != sorted(AXES),
        f"it must name each axis once; use {','.join(AXES)}, or another order of these",
    ),
    Rule(
        "sum of the stages",
        ("stage_layers", "layers"),
        lambda v: v.stage_layers is not None and sum(v.stage_layers) != v.layers,
        "each block belongs to one stage; use numbers whose sum is {layers}, or leave"
        " --stage-layers out",
    ),
    Rule(
        "rows of a step",
        ("batch_size", "dp", "num_microbatches"),
        lambda v: v.batch_size and v.batch_size % (v.dp * v.num_microbatches) > 0,
        "all replicas and microbatches have equal numbers of rows; use a --batch-size that is a"
        " multiple of {dp} * {num_microbatches}, or another --num-microbatches",
        complete=True,
    ),
    Rule(
        "method of one rank",
        ("cp_attention", "cp"),
        lambda v: v.cp == 1 and v.cp_attention is not None,
        "it sets how the ranks of --cp attend, and there is only one; leave --cp-attention out, or"
        " use a larger --cp",
    ),
    Rule(
        "pieces of a row",
        ("seq_len", "cp", "cp_attention"),
        lambda v: v.cp > 1 and v.seq_len % (v.cp * PIECES_PER_RANK[v.cp_attention or "ring"]) > 0,
        "context-parallel ranks hold equal chunks of a row: two each, or one with ulysses; use a"
        " --seq-len that is a multiple of 2 * {cp}, or another --cp",
    ),
    Rule(
        "heads for tokens",
        ("cp", "cp_attention", "kv_heads", "tp"),
        lambda v: (
            v.cp_attention == "ulysses"
            and v.cp > 1
            and cuts_heads(v.tp, v.heads, v.kv_heads)
            and max(1, v.kv_heads // v.tp) % v.cp > 0
        ),
        "ulysses distributes the key/value heads of a tensor-parallel rank (kv-heads / tp, at"
        " least one) evenly over the context-parallel ranks; use a --cp that divides them, or"
        " --cp-attention ring",
        complete=True,
    ),
    Rule(
        "ranks without experts",
        ("ep", "experts"),
        lambda v: v.ep > 1 and v.experts is None,
        "expert-parallel ranks divide the experts of a block, and there are none; use --ep 1, or"
        " add --experts",
    ),
    Rule(
        "experts of a rank",
        ("ep", "experts", "dp", "cp"),
        lambda v: v.experts and v.experts % v.ep > 0,
        "expert-parallel ranks hold equal numbers of experts; use an --ep that divides {experts}",
        complete=True,
    ),
    Rule(
        "ranks of experts",
        ("ep", "dp", "cp"),
        lambda v: v.experts and v.dp * v.cp % v.ep > 0,
        "expert-parallel groups are equal parts of the dp x cp ranks; use an --ep that divides"
        " {dp} * {cp}",
        complete=True,
    ),
    Rule(
        "islands of replicas",
        ("islands", "dp"),
        lambda v: v.islands and v.dp % v.islands > 0 and not v.chooses_layout,
        "islands are equal parts of the dp replicas; use an --islands that divides {dp}, or a"
        " --dp that is a multiple of {islands}",
        complete=True,
    ),
    Rule(
        "experts over islands",
        ("ep", "islands", "dp", "cp"),
        lambda v: v.experts and v.islands and v.dp % v.islands == 0 and island_data(v) % v.ep > 0,
        "each island holds all experts, divided over its dp/islands x cp ranks; use an --ep that"
        " divides {experts} and {dp} / {islands} * {cp}",
        complete=True,
    ),
    Rule(
        "layout of islands",
        ("islands",),
        lambda v: v.islands is not None and v.chooses_layout,
        "--layout auto compares steps in which all replicas sum their gradients; name the axes, as"
        " in --layout dp={islands}",
    ),
    Rule(
        "work of a step",
        ("num_microbatches", "layers", "pp"),
        lambda v: -(-v.layers // v.pp) * v.num_microbatches > MOST_WORK,
        f"a pipeline rank may run at most {MOST_WORK:,} passes of blocks per step, because"
        " predicting more takes minutes; use a smaller --num-microbatches",
        complete=True,
    ),
    # memory
    Rule(
        "nothing to shard",
        ("zero", "dp", "cp", "islands"),
        lambda v: v.zero > 0 and island_data(v) == 1,
        "ZeRO shards what all dp x cp ranks hold, in each island, and there is only one; leave"
        " --zero out, or use a larger --dp",
        complete=True,
    ),
    # the machine
    Rule(
        "kernels of a device",
        ("kernels", "device"),
        lambda v: v.kernels is not None and v.kernels not in KERNELS[v.device],
        "each device has its own kernels; use numpy or numba on --device cpu, fused or plain on"
        " --device cuda",
    ),
    Rule(
        "fused kernels in float64",
        ("kernels", "dtype"),
        lambda v: v.kernels == "fused" and v.dtype == "float64",
        "no fused kernel computes in float64; leave --kernels out, or use --dtype float32",
    ),
    Rule(
        "products of 16 bits",
        ("gemm", "dtype"),
        lambda v: v.gemm != "blas" and v.dtype in ("float32", "float64"),
        "mpipar's own kernel multiplies on tensor cores, which take 16 bits; use --dtype bfloat16,"
        " or --gemm blas",
    ),
    Rule(
        "scale that rounds",
        ("loss_scale",),
        lambda v: v.loss_scale is not None and math.frexp(v.loss_scale)[0] != 0.5,
        "only a power of two scales without rounding; use one, such as --loss-scale 1024",
    ),
    # the run
    Rule(
        "folder to resume in",
        ("resume",),
        lambda v: v.resume == AUTO and v.out is None,
        "auto resumes in a folder that has a name; add --out, such as --out runs/mine",
    ),
    Rule(
        "two sources",
        ("init_from", "resume"),
        lambda v: v.resume not in (NEVER, AUTO) and v.init_from is not None,
        "a checkpoint already contains weights; leave --init-from or --resume out (only auto takes"
        " both, for the first start)",
    ),
    Rule(
        "late warning",
        ("hang_warn", "hang_stop"),
        lambda v: v.hang_warn != RunConfig.hang_warn and 0 < v.hang_stop < v.hang_warn,
        "the job ends before the warning; use at most --hang-warn {hang_stop:g}",
    ),
    Rule(
        "steps of a trace",
        ("trace",),
        lambda v: v.trace not in (None, "none") and trace_steps(v.trace) is None,
        "a trace has a first and a last step, counted from 1; use --trace 10:12, --trace 10, or"
        " --trace none",
    ),
    Rule(
        "trace after the end",
        ("trace", "steps"),
        lambda v: (trace_steps(v.trace) or (0, 0))[1] > v.steps,
        "the run ends before that; trace steps up to {steps}, or use a larger --steps",
    ),
    Rule(
        "costs for nothing",
        ("machine",),
        lambda v: v.machine is not None and not v.chooses_layout,
        "it is for --layout auto, which is not given; leave --machine out, or add --layout auto",
    ),
)

# --- from what was typed to a complete Config

WHOLE_TOKENS = 1 << 14  # tokens of a step that a single rank computes in one microbatch
Check = tuple[Callable[[Config], list[str] | None], type[UserError]]


def _value_problems(config: Config) -> dict[str, str]:
    """Return {field name: what is wrong with its value}, each field on its own."""
    return {
        field.name: problem
        for _, field, value in settings(config)
        if (problem := field_problem(field, value))
    }


def config_problems(config: Config) -> list[str]:
    """Return everything wrong with the values themselves, whatever the number of ranks."""
    return [
        *_value_problems(config).values(),
        *(rule.problem(values) for rule, values in broken_rules(config, None)),
    ]


def _choose_batch(config: Config) -> tuple[Config, list[str]]:
    """Return the config with a batch size that replicas and microbatches divide, and notes."""
    preset, dp, num_mb = PRESETS[config.run.preset], config.grid.dp, config.grid.num_microbatches
    usual = preset["batch_size"]
    rows = config.train.batch_size or -(-usual // (dp * num_mb)) * dp * num_mb
    notes = [
        (
            f"batch size {usual} of preset {config.run.preset} rounded up to {rows}, a multiple of"
            f" dp {dp} * {counted(num_mb, 'microbatch')}"
        )
    ] * (config.train.batch_size is None and rows != usual)
    return replace(config, train=replace(config.train, batch_size=rows)), notes


# If one of these is wrong, nothing is chosen, and the checks of other packages do not run: they
# could not compute with the value.
FIRST = {
    "batch_size",
    "preset",
    "dtype",
    "device",
    *(field.name for part in (ModelConfig, GridConfig) for field in dataclasses.fields(part)),
} - {"schedule"}  # nothing is computed with the name of one that does not exist


def _choose(config: Config, world_size: int) -> tuple[Config, set[str]]:
    """Return the config with layout, microbatches and model filled in, and the guessed axes.

    If no layout fits, axes that were not given are 1; those returned are then not judged. A guessed
    tp is judged, because what fails with 1 fails with any.
    """
    model, given, preset = config.model.completed(), config.grid, PRESETS[config.run.preset]
    axes = (given.dp, given.pp, given.tp)
    fitting = matching(axes, world_size, model.layers, model.heads, kv_heads(model), given.cp)
    dp, pp, tp = fitting[0] if fitting else [axis or 1 for axis in axes]
    method = given.cp_attention or ("ring" if given.cp > 1 else None)
    grid = replace(given, dp=dp, pp=pp, tp=tp, cp_attention=method)
    # Microbatches serve pipelines and memory; each costs interpreter time.
    tokens = (config.train.batch_size or preset["batch_size"]) * model.seq_len
    few = grid.num_ranks == 1 and tokens <= WHOLE_TOKENS
    num_mb = given.num_microbatches or (1 if few else preset["num_microbatches"])
    guessed = set() if fitting else {axis for axis in ("dp", "pp") if getattr(given, axis) is None}
    return replace(config, model=model, grid=replace(grid, num_microbatches=num_mb)), guessed


def broken_rules(
    config: Config,
    world_size: int | None,
    rules: Iterable[Rule] = RULES,
    bad: Iterable[str] = (),
    **facts,
) -> list[tuple[Rule, SimpleNamespace]]:
    """Return the rules that a Config breaks on so many ranks, each with the values it judged.

    If their number is unknown, only what was typed is judged. config, bad: as in `resolve`. facts:
    further values that rules judge by, see `values_of`.
    """
    bad = {*_value_problems(config), *bad}
    free = frozenset(axis for axis in ("dp", "pp", "tp") if getattr(config.grid, axis) is None)
    facts |= {"ranks": world_size, "free": free}
    is_open = world_size is None or bool(bad & FIRST)
    stages = [(False, values_of(config, **facts), bad | ({"ranks"} if is_open else set()))]
    if not is_open:
        chosen, guessed = _choose(config, world_size)
        stages.append((True, values_of(chosen, **facts), bad | guessed))
    return [
        (rule, values)
        for complete, values, unknown in stages
        for rule in rules
        if rule.complete == complete
        and vars(values).keys() - unknown >= {*rule.fields}  # in force, and readable
        and rule.broken(values)
    ]


def resolve(
    config: Config,
    world_size: int,
    checks: Iterable[Check] = (),
    *,
    errors: Iterable[UserError] = (),
    bad: Iterable[str] = (),
    rules: Iterable[Rule] = RULES,
    **facts,
) -> tuple[Config, list[str]]:
    """Fill in every None; return the config and notes; raise one UserError with all problems.

    checks: functions of other packages that list a config's problems, each with its class of error.
    They get the completed config, and may raise a UserError of their own. errors: those found so
    far. bad: fields whose text could not even be read; they hold defaults, from which nothing is
    concluded. rules: those to be kept; facts: further values they judge by, see `values_of`.
    """
    found, notes = _value_problems(config), []
    bad = {*found, *bad}
    rules_broken = broken_rules(config, world_size, rules, bad, **facts)
    usage = [*found.values(), *(rule.problem(values) for rule, values in rules_broken)]
    errors = [*errors, *([UsageError(usage)] if usage else [])]
    if not bad & FIRST:
        config, notes = _choose_batch(_choose(config, world_size)[0])
        for check, error in checks:
            try:
                if texts := check(config):
                    raise error(texts)
            except UserError as raised:
                errors.append(raised)
    if errors:
        raise combine(errors)
    return config, notes
