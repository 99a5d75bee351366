"""The table of illegal combinations of settings: a row per reason, with the nearest legal values.

These rows depend on settings alone. `pipeline.combinations` adds those of schedules and holds the
whole table, which docs/reference/combinations.md prints. Values that are wrong by themselves are
refused by a field's bounds, and settings that belong to another choice by its `only`: see
`config.setting`.

Options of an axis that has one rank are legal, such as --sequence-parallel with --tp 1: a group of
one sends nothing, and so the same flags fit every layout.
"""

from __future__ import annotations

import math
import re

from mpipar.comm.grid import AXES, PIECES_PER_RANK
from mpipar.config.grid import AUTO
from mpipar.config.layout import axes_text, cuts_heads, divisors, fitting, matching, nearest
from mpipar.config.model import SCALING
from mpipar.config.rule import Rule
from mpipar.config.run import NEVER, RunConfig, trace_steps
from mpipar.ops import KERNELS

MOST_WORK = 1 << 15  # forward passes of blocks per step on one pipeline rank
CHOSEN_AXES = ("dp", "pp", "tp")  # if they are not given


def kv_heads(v) -> int:
    """Return the number of key/value heads."""
    return v.kv_heads or v.heads


def head_width(v) -> int:
    """Return the width of a head."""
    return v.head_dim or v.d_model // v.heads


def product(v, *without: str) -> int:
    """Return the product of the given axes, except those in `without`."""
    return math.prod(getattr(v, axis) for axis in AXES if axis not in (*v.free, *without))


def could_be(v, axis: str, size: int) -> bool:
    """Return whether an axis could have this size on these ranks, beside the other given axes."""
    if v.ranks is None:
        return True
    left, rest = divmod(v.ranks, product(v, axis) * size)
    return rest == 0 and (left == 1 or bool(v.free - {axis}))


def is_no_product(v) -> bool:
    """Return whether the given axes can't make up the number of ranks."""
    total = product(v)
    return v.ranks % total > 0 or (not v.free and total != v.ranks)


def layouts(v, count: int = 8) -> list[str]:
    """Return layouts of these ranks, as values of --layout."""
    options = [] if v.ranks % v.cp else fitting(v.ranks // v.cp, v.layers, v.heads, kv_heads(v))
    return [
        axes_text(dict(zip((*CHOSEN_AXES, "cp"), (*one, v.cp), strict=True)))
        for one in options[:count]
    ]


def fits_nowhere(v) -> bool:
    """Return whether no layout has the given axes, though each of them is legal by itself."""
    legal = (
        not is_no_product(v)
        and (v.pp or 1) <= v.layers
        and cuts_heads(v.tp or 1, v.heads, kv_heads(v))
    )
    return legal and not matching((v.dp, v.pp, v.tp), v.ranks, v.layers, v.heads, kv_heads(v), v.cp)


def multiples(number: int, unit: int) -> list[int]:
    """Return the multiples of a unit on both sides of a number that is not one of them."""
    up = -(-number // unit) * unit
    return [up - unit] * (up > unit) + [up]


def pieces(v) -> int:
    """Return the number of equal chunks into which context-parallel ranks cut a row."""
    return v.cp * PIECES_PER_RANK[v.cp_attention or "ring"]


def heads_of_a_rank(v) -> int:
    """Return the number of key/value heads on one rank of tp."""
    return max(1, v.kv_heads // v.tp)


def example_steps(v) -> str:
    """Return steps to trace, late enough to be typical."""
    return f"{min(10, v.steps)}:{min(12, v.steps)}"


MODEL = (
    Rule(
        "head width",
        ("heads", "d_model"),
        "the heads divide the width D into equal parts, unless --head-dim sets their width",
        lambda v: v.head_dim is None and v.d_model % v.heads > 0,
        lambda v: {
            "heads": nearest(divisors(v.d_model), v.heads),
            "head_dim": [max(2, v.d_model // v.heads // 2 * 2)],
        },
        "--heads 3",
    ),
    Rule(
        "rotated pairs",
        ("positions", "d_model", "heads", "head_dim"),
        "rotary positions rotate the features of a head in pairs, and their number is odd",
        lambda v: (
            v.positions == "rope"
            and head_width(v) % 2 > 0
            and not (v.head_dim is None and v.d_model % v.heads)
        ),
        lambda v: {"head_dim": [head_width(v) + 1]},
        "--positions rope --head-dim 5",
    ),
    Rule(
        "groups of heads",
        ("kv_heads", "heads"),
        "each key/value head serves equally many query heads",
        lambda v: v.heads % kv_heads(v) > 0,
        lambda v: {"kv_heads": nearest(divisors(v.heads), v.kv_heads)},
        "--arch llama --kv-heads 3",
    ),
    Rule(
        "heads of GPT-2",
        ("kv_heads", "heads", "arch"),
        "gpt2 stores queries, keys and values as equal parts of one weight matrix",
        lambda v: v.arch == "gpt2" and kv_heads(v) != v.heads,
        lambda v: {"arch": ["llama"], "kv_heads": [None]},
        "--kv-heads 2",
    ),
    Rule(
        "gate of GPT-2",
        ("activation", "arch"),
        "the weights of gpt2 have no matrix for a gate",
        lambda v: v.activation == "swiglu" and v.arch == "gpt2",
        lambda v: {"arch": ["llama"], "activation": ["gelu"]},
        "--activation swiglu",
    ),
    Rule(
        "cut of a gate",
        ("ffn_cut", "activation"),
        "gather and reduce each cut a single product, and swiglu's up-projection has two",
        lambda v: v.ffn_cut != "pair" and v.activation == "swiglu",
        lambda v: {"ffn_cut": ["pair"]},
        "--arch llama --ffn-cut reduce",
    ),
    Rule(
        "cut of tokens",
        ("ffn_cut", "sequence_parallel"),
        "gather and reduce keep all tokens on every rank, and sequence parallelism does not",
        lambda v: v.ffn_cut != "pair" and v.sequence_parallel,
        lambda v: {"ffn_cut": ["pair"], "sequence_parallel": [None]},
        "--ffn-cut gather --sequence-parallel",
    ),
    Rule(
        "ring of pieces",
        ("tp_matmul", "sequence_parallel"),
        "ring splits the barriers of sequence parallelism into pieces, and there are none",
        lambda v: v.tp_matmul == "ring" and not v.sequence_parallel,
        lambda v: {"sequence_parallel": [True], "tp_matmul": ["plain"]},
        "--tp-matmul ring",
    ),
    Rule(
        "slowed rotations",
        ("rope_scaling",),
        "it takes four numbers: factor, low and high frequency factor, original length, with low"
        " below high",
        lambda v: (
            v.rope_scaling
            and not (len(v.rope_scaling) == 4 and v.rope_scaling[1] < v.rope_scaling[2])
        ),
        lambda v: {"rope_scaling": [SCALING, None]},
        "--arch llama --rope-scaling 8,4,1,64",
    ),
    Rule(
        "longest row",
        ("seq_len", "max_positions"),
        "a row cannot be longer than the longest one that the positions are made for",
        lambda v: v.seq_len > (v.max_positions or v.seq_len),
        lambda v: {"seq_len": [v.max_positions], "max_positions": [v.seq_len]},
        "--arch llama --max-positions 32",
    ),
    Rule(
        "experts of a token",
        ("experts_per_token", "experts"),
        "a token is routed to distinct experts, and there are fewer",
        lambda v: v.experts_per_token > v.experts,
        lambda v: {"experts_per_token": [v.experts], "experts": [v.experts_per_token]},
        "--experts 4 --experts-per-token 5",
    ),
    Rule(
        "blocks of experts",
        ("expert_interval", "layers"),
        "one block in so many has experts, and there are fewer blocks",
        lambda v: v.expert_interval > v.layers,
        lambda v: {"expert_interval": [v.layers], "layers": [v.expert_interval]},
        "--experts 4 --expert-interval 5",
    ),
    Rule(
        "end of a text",
        ("stop_token", "vocab_size"),
        "an id that ends a text must be in the vocabulary, and so below its size",
        lambda v: any(one >= v.vocab_size for one in v.stop_token),
        lambda v: {"stop_token": [None], "vocab_size": [max(v.stop_token) + 1]},
        "--stop-token 256",
    ),
)

LAYOUT = (
    Rule(
        "number of ranks",
        ("dp", "pp", "tp", "cp", "ranks"),
        "the product of the axes must be the number of ranks",
        is_no_product,
        lambda v: {"layout": layouts(v), "ranks": [product(v)]},
        "--dp 2 --pp 2 --tp 2",
        ranks=4,
    ),
    Rule(
        "heads of a rank",
        ("heads", "tp", "ranks"),
        "tensor-parallel ranks hold equal numbers of heads",
        lambda v: v.tp and v.heads % v.tp > 0,
        lambda v: {
            "tp": nearest(
                [
                    one
                    for one in divisors(v.heads)
                    if could_be(v, "tp", one) and cuts_heads(one, v.heads, kv_heads(v))
                ],
                v.tp,
            ),
            "heads": nearest(
                [
                    one
                    for one in divisors(v.d_model)
                    if one % v.tp == 0
                    and cuts_heads(v.tp, one, v.kv_heads or one)
                    and one % (v.kv_heads or one) == 0
                ],
                v.heads,
                2,
            ),
        },
        "--heads 6 --d-model 96 --tp 4",
        ranks=4,
    ),
    Rule(
        "kv heads of a rank",
        ("kv_heads", "heads", "tp", "ranks"),
        "tensor-parallel ranks hold whole key/value heads: equally many each, or copies of one",
        lambda v: v.tp and v.heads % v.tp == 0 and not cuts_heads(v.tp, v.heads, kv_heads(v)),
        lambda v: {
            "tp": nearest(
                [
                    one
                    for one in divisors(v.heads)
                    if could_be(v, "tp", one) and cuts_heads(one, v.heads, v.kv_heads)
                ],
                v.tp,
            ),
            "kv_heads": nearest(
                [one for one in divisors(v.heads) if cuts_heads(v.tp, v.heads, one)], v.kv_heads
            ),
        },
        "--arch llama --heads 6 --kv-heads 3 --d-model 96 --tp 2",
        ranks=2,
    ),
    Rule(
        "blocks of a rank",
        ("pp", "layers", "ranks"),
        "each pipeline rank needs at least one block",
        lambda v: v.pp and v.pp > v.layers,
        lambda v: {
            "pp": nearest(
                [
                    one
                    for one in range(max(1, v.layers - 63), v.layers + 1)
                    if could_be(v, "pp", one)
                ],
                v.pp,
            ),
            "layers": [v.pp],
        },
        "--pp 4 --layers 2",
        ranks=4,
    ),
    Rule(
        "no layout",
        ("dp", "pp", "tp", "cp", "ranks"),
        "no layout with these axes fits the model's blocks and heads",
        fits_nowhere,
        lambda v: {"layout": layouts(v)},
        "--dp 1",
        ranks=7,
    ),
    Rule(
        "order of axes",
        ("rank_order",),
        "it must name each axis once",
        lambda v: sorted(v.rank_order.split(",")) != sorted(AXES),
        lambda v: {"rank_order": [",".join(AXES)]},
        "--rank-order pp,dp,tp",
    ),
    Rule(
        "sum of the stages",
        ("stage_layers", "layers"),
        "each block belongs to one stage",
        lambda v: v.stage_layers is not None and sum(v.stage_layers) != v.layers,
        lambda v: {"layers": [sum(v.stage_layers) or None], "stage_layers": [None]},
        "--stage-layers 3,2 --pp 2",
        ranks=2,
    ),
    Rule(
        "rows of a step",
        ("batch_size", "dp", "num_microbatches"),
        "all replicas and microbatches have equal numbers of rows",
        lambda v: v.batch_size and v.batch_size % (v.dp * v.num_microbatches) > 0,
        lambda v: {
            "batch_size": multiples(v.batch_size, v.dp * v.num_microbatches),
            "num_microbatches": []
            if v.batch_size % v.dp
            else nearest(divisors(v.batch_size // v.dp), v.num_microbatches),
            "dp": nearest(
                [
                    one
                    for one in divisors(v.batch_size)
                    if v.batch_size % (one * v.num_microbatches) == 0 and could_be(v, "dp", one)
                ],
                v.dp,
            ),
        },
        "--batch-size 30 --num-microbatches 4",
        complete=True,
    ),
    Rule(
        "method of one rank",
        ("cp_attention", "cp"),
        "it sets how the ranks of --cp attend, and there is only one",
        lambda v: v.cp == 1 and v.cp_attention is not None,
        lambda v: {
            "cp_attention": [None],
            "cp": [2] if v.ranks and v.ranks % 2 == 0 and could_be(v, "cp", 2) else [],
        },
        "--cp-attention gather",
        ranks=2,
    ),
    Rule(
        "pieces of a row",
        ("seq_len", "cp", "cp_attention"),
        "context-parallel ranks hold equal chunks of a row: two each, or one with ulysses",
        lambda v: v.cp > 1 and v.seq_len % pieces(v) > 0,
        lambda v: {
            "seq_len": multiples(v.seq_len, pieces(v)),
            "cp": nearest(
                [
                    one
                    for one in divisors(v.seq_len)
                    if v.seq_len % (one * pieces(v) // v.cp) == 0
                    and (one > 1 or v.cp_attention is None)
                    and v.ranks
                    and could_be(v, "cp", one)
                ],
                v.cp,
            ),
        },
        "--cp 2 --seq-len 63",
        ranks=2,
    ),
    Rule(
        "heads for tokens",
        ("cp", "cp_attention", "kv_heads", "tp"),
        "ulysses distributes the key/value heads of a tensor-parallel rank (kv-heads / tp, at"
        " least one) evenly over the context-parallel ranks",
        lambda v: (
            v.cp_attention == "ulysses"
            and v.cp > 1
            and cuts_heads(v.tp, v.heads, v.kv_heads)
            and heads_of_a_rank(v) % v.cp > 0
        ),
        lambda v: {
            "cp": nearest(
                [one for one in divisors(heads_of_a_rank(v))[1:] if could_be(v, "cp", one)], v.cp
            ),
            "cp_attention": ["ring", "gather"] if v.seq_len % (2 * v.cp) == 0 else [],
        },
        "--cp 4 --cp-attention ulysses --tp 2",
        ranks=8,
        complete=True,
    ),
    Rule(
        "ranks without experts",
        ("ep", "experts"),
        "expert-parallel ranks divide the experts of a block, and there are none",
        lambda v: v.ep > 1 and v.experts is None,
        lambda v: {"ep": [1], "experts": [v.ep]},
        "--ep 2 --dp 2",
        ranks=2,
    ),
    Rule(
        "experts of a rank",
        ("ep", "experts", "dp", "cp"),
        "expert-parallel ranks hold equal numbers of experts",
        lambda v: v.experts and v.experts % v.ep > 0,
        lambda v: {
            "ep": nearest(divisors(math.gcd(v.experts, v.dp * v.cp)), v.ep),
            "experts": multiples(v.experts, v.ep),
        },
        "--experts 4 --ep 3 --dp 3",
        ranks=3,
        complete=True,
    ),
    Rule(
        "ranks of experts",
        ("ep", "dp", "cp"),
        "expert-parallel groups are equal parts of the dp x cp ranks",
        lambda v: getattr(v, "experts", None) and v.dp * v.cp % v.ep > 0,
        lambda v: {"ep": nearest(divisors(math.gcd(v.experts, v.dp * v.cp)), v.ep)},
        "--experts 4 --ep 4 --dp 2",
        ranks=2,
        complete=True,
    ),
    Rule(
        "work of a step",
        ("num_microbatches", "layers", "pp"),
        f"a pipeline rank may run at most {MOST_WORK:,} passes of blocks per step, because"
        " predicting more takes minutes",
        lambda v: -(-v.layers // v.pp) * v.num_microbatches > MOST_WORK,
        lambda v: {"num_microbatches": [MOST_WORK // -(-v.layers // v.pp)]},
        "--num-microbatches 16384",
        complete=True,
    ),
)

MEMORY = (
    Rule(
        "nothing to shard",
        ("zero", "dp", "cp"),
        "ZeRO shards what all dp x cp ranks hold, and there is only one",
        lambda v: v.zero > 0 and v.dp * v.cp == 1,
        lambda v: {
            "zero": [0],
            "dp": nearest(
                [one for one in divisors(v.ranks or 1)[1:] if could_be(v, "dp", one)], 2, 1
            ),
        },
        "--zero 1",
        ranks=2,
        complete=True,
    ),
)

MACHINE = (
    Rule(
        "kernels of a device",
        ("kernels", "device"),
        "each device has its own kernels",
        lambda v: v.kernels is not None and v.kernels not in KERNELS[v.device],
        lambda v: {
            "kernels": [one for one in KERNELS[v.device] if (one, v.dtype) != ("fused", "float64")],
            "device": [one for one in KERNELS if v.kernels in KERNELS[one]],
        },
        "--kernels fused",
    ),
    Rule(
        "fused kernels in float64",
        ("kernels", "dtype"),
        "no fused kernel computes in float64",
        lambda v: v.kernels == "fused" and v.dtype == "float64",
        lambda v: {"kernels": [None], "dtype": ["float32"]},
        "--device cuda --kernels fused --dtype float64",
    ),
    Rule(
        "products in float64",
        ("gemm", "dtype"),
        "none of mpipar's kernels multiplies in float64",
        lambda v: v.gemm != "blas" and v.dtype == "float64",
        lambda v: {"gemm": ["blas"], "dtype": ["float32"]},
        "--device cuda --gemm tile --dtype float64",
    ),
    Rule(
        "TF32 of other types",
        ("tf32", "dtype"),
        "TF32 rounds float32 operands",
        lambda v: v.tf32 and v.dtype != "float32",
        lambda v: {"tf32": [None], "dtype": ["float32"]},
        "--device cuda --tf32 --dtype bfloat16",
    ),
    Rule(
        "TF32 of other products",
        ("tf32", "gemm"),
        "TF32 is a mode of cuBLAS, which does not multiply here",
        lambda v: v.tf32 and v.gemm != "blas",
        lambda v: {"tf32": [None], "gemm": ["blas"]},
        "--device cuda --tf32 --gemm tile",
    ),
    Rule(
        "scale that rounds",
        ("loss_scale",),
        "only a power of two scales without rounding",
        lambda v: v.loss_scale is not None and math.frexp(v.loss_scale)[0] != 0.5,
        lambda v: {"loss_scale": [2.0 ** round(math.log2(v.loss_scale))]},
        "--dtype float16 --loss-scale 1000",
    ),
)

RUN = (
    Rule(
        "plain name",
        ("run_name",),
        "a name in runs/ has no slash and is not . or .., but --out takes any folder",
        lambda v: v.run_name is not None and (v.run_name in ("", ".", "..") or "/" in v.run_name),
        lambda v: {"run_name": [re.sub("[/.]+", "-", v.run_name).strip("-") or None]},
        "--run-name a/b",
    ),
    Rule(
        "two folders",
        ("run_name", "out"),
        "both name the run folder",
        lambda v: v.run_name is not None and v.out is not None,
        lambda v: {"run_name": [None], "out": [None]},
        "--run-name a --out b",
    ),
    Rule(
        "folder to resume in",
        ("resume",),
        "auto resumes in a folder that has a name",
        lambda v: v.resume == AUTO and v.run_name is None and v.out is None,
        lambda v: {"run_name": ["mine"], "out": ["runs/mine"]},
        "--resume auto",
    ),
    Rule(
        "two sources",
        ("init_from", "resume"),
        "a checkpoint already contains weights; only auto takes both, for the first start",
        lambda v: v.resume not in (NEVER, AUTO) and v.init_from is not None,
        lambda v: {"init_from": [None], "resume": [None]},
        "--init-from runs/0001 --resume runs/0002",
    ),
    Rule(
        "empty texts",
        ("sample_interval", "sample_tokens"),
        "no tokens are generated between steps",
        lambda v: v.sample_interval > 0 and v.sample_tokens == 0,
        lambda v: {"sample_interval": [None], "sample_tokens": [200]},
        "--sample-interval 5 --sample-tokens 0",
    ),
    Rule(
        "late warning",
        ("hang_warn", "hang_stop"),
        "the job ends before the warning",
        lambda v: v.hang_warn != RunConfig.hang_warn and 0 < v.hang_stop < v.hang_warn,
        lambda v: {"hang_warn": [0.0, v.hang_stop], "hang_stop": [v.hang_warn]},
        "--hang-warn 90 --hang-stop 80",
    ),
    Rule(
        "steps of a trace",
        ("trace",),
        "a trace has a first and a last step, counted from 1",
        lambda v: v.trace is not None and trace_steps(v.trace) is None,
        lambda v: {"trace": [example_steps(v)]},
        "--trace 12:10",
    ),
    Rule(
        "trace after the end",
        ("trace", "steps"),
        "the run ends before that",
        lambda v: (trace_steps(v.trace) or (0, 0))[1] > v.steps,
        lambda v: {"trace": [str(v.steps)], "steps": [trace_steps(v.trace)[1]]},
        "--trace 400",
    ),
    Rule(
        "operations without a trace",
        ("trace_ops",),
        "operations are timed in the steps of --trace",
        lambda v: v.trace_ops and v.trace is None,
        lambda v: {"trace": [example_steps(v)], "trace_ops": [None]},
        "--trace-ops",
    ),
    Rule(
        "costs for nothing",
        ("machine",),
        "it is for --layout auto, which is not given",
        lambda v: v.machine is not None and not v.chooses_layout,
        lambda v: {"machine": [None], "layout": [AUTO]},
        "--machine costs.json",
    ),
)

RULES = (*MODEL, *LAYOUT, *MEMORY, *MACHINE, *RUN)
