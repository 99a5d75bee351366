"""Training steps with the fused kernels between the products: `--kernels fused`.

Tests marked gpu run on a GPU, and in CI on the CUDA machine: the real CuPy on a CPU.
"""

from dataclasses import replace

import numpy as np
import pytest
from config_helpers import changed, check_refused, reading_of
from cuda_fused import BOUNDS, DTYPES
from helpers import assert_all_close, assert_close
from ops_cases import ADAMW, LARGE, SMALL, call_every_op, plain, runs_of

from mpipar.comm.grid import Grid
from mpipar.config.model import ARCHS
from mpipar.config.resolve import resolve
from mpipar.ops import make, shapes_for
from mpipar.ops.cuda.epilogues import Epilogues
from mpipar.ops.cuda.kernels import Loader
from mpipar.ops.cupy_fused import FusedOps
from mpipar.ops.mixed_ops import MixedOps
from mpipar.run.console.tables import headline
from mpipar.run.resolve import resolve as resolve_typed
from mpipar.run.verify import step_tensors
from mpipar.study.explain.predict import predict

SHAPE = {
    "layers": 2,
    "d_model": 12,
    "heads": 3,
    "ffn": 20,
    "seq_len": 6,
    "vocab_size": 17,
    "batch_size": 4,
    "num_microbatches": 2,
}


LLAMA = ARCHS["llama"] | SHAPE | {"arch": "llama", "heads": 4, "kv_heads": 2, "head_dim": 6}


@pytest.fixture
def traced(monkeypatch, cupy):
    """(names of the kernels that are started, arrays of 16 bits that are widened).

    Without cuBLASLt, which does some of the kernels' work: see test_cuda_machine_epilogues.py.
    """
    monkeypatch.setattr(Epilogues, "_multiply", lambda self, *arguments, **named: False)
    started, widened = [], []
    launch, wide = Loader.launch, MixedOps._wide
    monkeypatch.setattr(
        Loader,
        "launch",
        lambda self, file, name, *rest, **named: (
            started.append(name.split("<")[0]),
            launch(self, file, name, *rest, **named),
        ),
    )
    monkeypatch.setattr(
        MixedOps,
        "_wide",
        lambda self, x: (
            widened.append(x) if getattr(x, "dtype", None) == self.dtype else None,
            wide(self, x),
        )[1],
    )
    return started, widened


@pytest.fixture(params=["in tiles", "whole scores"])
def attention(request, monkeypatch):
    """Attention in both ways: with heads that fit a tile, and as if none did."""
    if request.param == "whole scores":
        monkeypatch.setattr(FusedOps, "tiled_head_width", 0)
    return request.param


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        (SMALL, "ties"),
        *(pytest.param(LARGE, kind, marks=pytest.mark.slow) for kind in ("increasing", "shuffled")),
    ],
)
def test_every_function_equals_plain(cupy, attention, sizes, kind):
    ops = make("cuda", "float32")
    assert isinstance(ops, FusedOps)
    expected = call_every_op(plain("float64"), sizes, kind)
    for name, value in call_every_op(ops, sizes, kind).items():
        assert_close(
            value if isinstance(value, float) else ops.to_host(value), expected[name], 2e-5, name
        )


def step(shape=SHAPE, **run):
    """(loss, norm, gradients, weights) of one step of a small model."""
    config, _ = resolve(changed(**shape, **run), 1)
    return step_tensors(config, np.random.default_rng(1).integers(0, 17, 200), Grid(0))


@pytest.fixture(scope="module")
def exact():
    """The same steps by NumPy's plain functions in float64, by optimizer; "rms" has that norm."""
    steps = {name: step(dtype="float64", optimizer=name) for name in ("sgd", "adamw")}
    return steps | {"rms": step(dtype="float64", optimizer="sgd", norm="rms")}


def check_step(found, expected, tol):
    """Compare all results of two steps; tol: of loss and norm, of tensors."""
    assert found[:2] == pytest.approx(expected[:2], rel=tol[0])
    for got, wanted in zip(found[2:], expected[2:], strict=True):
        assert_all_close(got, wanted, tol[1])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_float32_step_is_that_of_float64(cupy, attention, exact, optimizer):
    check_step(step(device="cuda", optimizer=optimizer), exact[optimizer], (1e-6, 1e-4))


def test_a_float32_step_with_rmsnorm_is_that_of_float64(cupy, exact):
    check_step(step(device="cuda", optimizer="sgd", norm="rms"), exact["rms"], (1e-6, 1e-4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_step_is_that_of_numpy(cupy, attention, dtype):
    """Both round between two functions; a GPU's attention also rounds operands of its products.

    These are probabilities and their gradients.
    """
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    run = {"dtype": dtype, "optimizer": "sgd"}
    check_step(step(device="cuda", **run), step(**run), (unit, 4 * unit))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("gelu_forward", lambda ops, x: x),
        ("matmul_tn_add_sums", lambda ops, x, y, out, sums: ops.matmul_tn_add(x, y, out)),
        ("rmsnorm_backward_weight", lambda ops, dy, x, rstd, dw: None),
        ("attention_backward_input", lambda ops, *rest, out: [ops.fill(x, 0) for x in out]),
        ("cross_entropy_backward_input", lambda ops, logits, *rest: logits),
    ],
    ids=lambda one: one[0],
)
def test_a_kernel_that_is_left_out_is_seen(monkeypatch, cupy, exact, change):
    monkeypatch.setattr(FusedOps, *change)
    norm, wanted = ("rms", "rms") if change[0].startswith("rms") else ("layer", "sgd")
    with pytest.raises(AssertionError):
        check_step(step(device="cuda", optimizer="sgd", norm=norm), exact[wanted], (1e-6, 1e-4))


@pytest.mark.parametrize(
    ("dtype", "norm"), [*((dtype, "layer") for dtype in DTYPES), ("bfloat16", "rms")]
)
def test_nothing_between_products_is_plain_or_widened(traced, attention, dtype, norm):
    """Counts the kernels that a step starts; nothing of 16 bits is widened."""
    started, widened = traced
    step(device="cuda", dtype=dtype, optimizer="adamw", norm=norm)
    microbatches, blocks = SHAPE["num_microbatches"], SHAPE["layers"]
    kernels = {
        "in tiles": ("flash_forward", "flash_delta", "flash_backward", "flash_dq"),
        "whole scores": ("causal_softmax_forward", "causal_softmax_backward"),
    }[attention]
    norms = 2 * blocks + 1
    once = {
        "gelu_forward": blocks,
        "gelu_backward": blocks,
        "column_sums": 4 * blocks,
        **{f"{norm}norm_{part}": norms for part in ("forward", "backward", "slabs")},
        **dict.fromkeys(kernels, blocks),
        "embedding_forward": 1,
        "position_forward": 1,
        "places_in_tiles": 2,
        "add_rows": 2,
        "cross_entropy_stats": 1,
        "cross_entropy_combine": 1,
        "cross_entropy_backward": 1,
    }
    counts = {name: microbatches * count for name, count in once.items()}
    updates = "adamw" if dtype == "float32" else "adamw_with_copy"
    counts[updates] = 1
    assert {name: started.count(name) for name in started} == counts
    assert widened == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.slow
def test_a_step_of_llama_runs_in_kernels_and_is_that_of_numpy(traced, dtype):
    """In 16 bits both round between two functions. Nothing is widened."""
    started, widened = traced
    found = step(LLAMA, device="cuda", dtype=dtype, optimizer="sgd")
    microbatches, blocks = SHAPE["num_microbatches"], SHAPE["layers"]
    for kernel, count in (
        ("swiglu_forward", blocks),
        ("swiglu_backward", blocks),
        ("rotate", 2 * blocks),
        ("column_sums", 0),
        ("gelu_forward", 0),
    ):
        assert started.count(kernel) == microbatches * count, kernel
    assert widened == []
    tol = 1e-4 if dtype == "float32" else 4 * BOUNDS[dtype]
    check_step(
        found,
        step(LLAMA, dtype="float64" if dtype == "float32" else dtype, optimizer="sgd"),
        (tol, tol),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_cross_entropy_over_a_cut_vocabulary(rng, cupy, dtype, shards):
    """The last shard has padding; with three, the last is all padding but one column."""
    ops, exact_ops = make("cuda", dtype), plain("float64")
    tokens, vocabulary, width = 9, 21, 30
    host = (3 * rng.standard_normal((tokens, width))).astype(DTYPES[dtype])
    targets = rng.integers(0, vocabulary, tokens)
    whole = host.astype(np.float64)
    stats = exact_ops.cross_entropy_forward(whole, targets, 0, vocabulary)
    loss, sums = exact_ops.cross_entropy_combine(stats[None])
    exact_ops.cross_entropy_backward_input(whole, targets, sums, 0, vocabulary, 0.25)
    own, step = cupy.asarray(targets), width // shards
    parts = [cupy.asarray(host[:, at : at + step].copy()) for at in range(0, width, step)]
    own_stats = cupy.empty((shards, tokens, 3), np.float32)
    for i, part in enumerate(parts):
        own_stats[i] = ops.cross_entropy_forward(part, own, i * step, vocabulary)
    own_loss, own_sums = ops.cross_entropy_combine(own_stats)
    assert_close(ops.to_host(own_loss), loss, 1e-6, "loss")
    tol = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for i, part in enumerate(parts):
        ops.cross_entropy_backward_input(part, own, own_sums, i * step, vocabulary, 0.25)
        assert part.dtype == DTYPES[dtype]
        assert_close(
            ops.to_host(part).astype(np.float64),
            whole[:, i * step : (i + 1) * step],
            tol,
            f"dlogits {i}",
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_update_writes_the_rounded_weights(rng, cupy, dtype):
    ops = make("cuda", dtype)
    master, grad, m, v = (cupy.asarray(rng.uniform(0.5, 2, 300).astype("f4")) for _ in range(4))
    rounded = ops.empty((300,))
    ops.adamw_runs(master, grad, m, v, runs_of(300), **ADAMW | {"lr": 0.1}, copy=rounded)
    assert (ops.to_host(rounded) == ops.to_host(master).astype(DTYPES[dtype])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_are_those_of_the_fused_kernels(cupy, attention, dtype):
    config = changed(dtype=dtype, device="cuda")
    ops, on_shapes = make("cuda", dtype), shapes_for(config.run, None)
    real, shapes = call_every_op(ops), call_every_op(on_shapes)
    assert shapes.keys() == real.keys()
    for name, value in real.items():
        if np.shape(value):  # not of numbers, which each kind of array has in its own way
            assert (shapes[name].shape, shapes[name].dtype) == (value.shape, value.dtype), name
    q, positions = ops.zeros((2, 7, 4, 5)), cupy.arange(7)
    saved, expected = (
        one.attention_forward(*3 * [one.asarray(q)], *2 * [one.asarray(positions)])[1]
        for one in (on_shapes, ops)
    )
    if attention == "in tiles":
        (same, saved), (y, expected) = saved, expected
        assert (same.shape, same.dtype) == (y.shape, y.dtype)
    assert (saved.shape, saved.dtype) == (expected.shape, expected.dtype)


def test_no_probabilities_are_predicted_on_a_gpu():
    """3 heads attend to 64 tokens. y is kept too, because the next product reads it."""
    shape = SHAPE | {"seq_len": 64, "vocab_size": 128}  # a table without padding
    config, _ = resolve(changed(**shape, dtype="float32"), 1)
    on_gpu = replace(config, run=replace(config.run, device="cuda"))
    cpu, gpu = (predict(one, 0).peak_bytes["stash"] for one in (config, on_gpu))
    numbers = 4 * 2 * 3 * 64 * SHAPE["layers"]  # one per query of the microbatch that is there
    assert cpu - gpu == 64 * numbers - 2 * numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_dq_are_predicted_on_a_gpu(dtype):
    ops = shapes_for(changed(dtype=dtype, device="cuda").run, None)
    q, positions = ops.zeros((2, 200, 3, 40)), ops.asarray(np.arange(200))
    stats, delta = (ops.zeros((2, 3, 200, *more), np.float32) for more in ((2,), ()))
    ops.reset_peak()
    ops.attention_block_backward(q, q, q, q, stats, delta, q_pos=positions, k_pos=positions)
    parts, padded = (4, 224) if dtype == "float32" else (2, 256)
    assert ops.peak["buffers"] == 4 * parts * 2 * 3 * padded * 64
    assert ops.peak["stash"] >= 3 * 4 * q.size + q.nbytes  # the results are there beside them


def test_prediction_has_no_widened_copies_on_a_gpu():
    """On the CPU the logits are widened for the loss: 4 bytes where the activations have 2.

    So they are by plain kernels, which multiply 16 bits as they are.
    """
    config, _ = resolve(changed(**SHAPE | {"vocab_size": 4096}, dtype="bfloat16"), 1)
    on_gpu = replace(config, run=replace(config.run, device="cuda"))
    plain_gpu = replace(config, run=replace(config.run, device="cuda", kernels="plain"))
    cpu, gpu, unfused = (predict(one, 0).peak_bytes for one in (config, on_gpu, plain_gpu))
    wide = 4 * 4096 * 6 * 2  # logits of a microbatch of two rows of six tokens
    assert cpu["buffers"] - gpu.get("buffers", 0) >= wide
    assert unfused["buffers"] == gpu.get("buffers", 0) + wide


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("--kernels fused", ["--kernels fused with --device cpu"]),
        ("--kernels plain", ["--kernels plain with --device cpu"]),
        ("--kernels numpy --device cuda", ["fused or plain on --device cuda"]),
        ("--kernels fused --device cuda --dtype float64", ["--dtype float64"]),
    ],
)
def test_what_does_not_fit_is_refused(words, messages):
    check_refused(words, messages)


def test_kernels_that_were_asked_for_are_printed():
    config, _ = resolve_typed(reading_of("--device", "cuda", "--kernels", "plain"), 1)
    assert headline(config, 1, 1, 1).splitlines()[0].endswith("float32 on cuda, plain kernels")
