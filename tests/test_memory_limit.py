"""--memory-limit: an error names what does not fit and the layouts that do; these train."""

import re
import resource
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fault_table import fault
from program import TEXT, block_of, mpipar
from threadpoolctl import threadpool_info, threadpool_limits

from mpipar import ops as ops_module
from mpipar.comm.record import Recorder
from mpipar.commands import memory_limit
from mpipar.commands.memory_limit import MemoryLimit, data_bytes, smallest_layouts, tight
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.errors import OutOfMemory

# One layer of 17 million parameters: 68 MB each for weights, gradients and two moments.
WIDE = """--layers 1 --d-model 256 --heads 8 --ffn 32768 --seq-len 16 --batch-size 4
    --num-microbatches 1 --steps 1 --sample-tokens 0""".split()
LIMIT = 190 << 20


@pytest.mark.slow
@fault(39, "a layer too large for the memory of a rank", 69)
def test_a_layer_too_large_for_one_rank_names_a_layout_that_trains(tmp_path):
    text = tmp_path / "text"
    text.write_text("A short text: its held-out end is read to the last row.\n" * 40)
    limited = (*WIDE, "--data", text, "--memory-limit", LIMIT)
    alone = mpipar("train", *limited, cwd=tmp_path)
    block = block_of(
        alone,
        69,
        "out of memory: optimizer (17144576,) float32",
        "wants 65.4 MiB",
        "gradients 65.4 MiB",
    )
    words, ranks = re.search(r"it fits with (--layout \S+) \(mpiexec -n (\d+);", block).groups()
    assert (words, ranks) == ("--layout dp=1,pp=1,tp=2", "2")
    done = mpipar("train", *limited, *words.split(), ranks=int(ranks), cwd=tmp_path).ended()
    assert "held-out loss" in done.stdout


@pytest.mark.slow
def test_a_context_too_long_for_its_ranks_names_what_makes_it_fit_on_them(tmp_path):
    """Neither recomputation nor ZeRO nor context parallelism is enough alone."""
    text = tmp_path / "text"
    text.write_text("A long context: its rows are cut, and so is what the ranks keep.\n" * 800)
    words = """--layers 6 --d-model 192 --heads 4 --seq-len 1024 --batch-size 4 --steps 2
        --num-microbatches 1 --sample-tokens 0 --memory-limit 58M""".split()
    limited = ("train", *words, "--data", text)
    block = block_of(mpipar(*limited, "--layout", "dp=4", ranks=4, cwd=tmp_path), 69)
    flags = re.search(r"on the same number of ranks it fits with (--layout [^(]+) \(", block)[1]
    assert flags == ("--layout dp=1,pp=1,cp=4,tp=1 --zero 3 --zero-grads sharded --recompute block")
    done = mpipar(*limited, *flags.split(), ranks=4, cwd=tmp_path).ended()
    assert "held-out loss" in done.stdout


def test_a_pass_that_does_not_fit_names_the_layer(tmp_path):
    words = "--layers 6 --d-model 64 --heads 2 --seq-len 256 --batch-size 32 --num-microbatches 1"
    result = mpipar("train", *words.split(), "--steps", 1, "--memory-limit", 60 << 20, cwd=tmp_path)
    block = block_of(result, 69)
    assert re.search(
        r"of block\d\.\S+ \(mpipar/\S+:\d+\), forward pass of stage 0, microbatch 0,"
        r" wants [\d.]+ MiB, but [\d.]+ \w+ are left",
        block,
    ), block
    assert "--layout dp=" in block


def limited(budget=None, **parts):
    """The configuration of one rank with a limit."""
    config = Config()
    return replace(config, run=replace(config.run, memory_limit=budget), **parts)


def test_the_limit_is_taken_back():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ops = ops_module.make("cpu", "float32")
    with MemoryLimit(limited(64 << 20), ops, Recorder()) as limit:
        # 16 MiB beside the budget are for the rest of the process
        assert limit.limit == pytest.approx(data_bytes() + (80 << 20), abs=4 << 20)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == limit.limit
        np.ones(32 << 20, np.uint8)
        with pytest.raises(MemoryError):
            np.ones(128 << 20, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_the_error_itself_has_freed_is_not_said_to_have_been_left():
    ops = ops_module.make("cpu", "float32")
    config = resolve(limited(64 << 20), 1)[0]
    with pytest.raises(OutOfMemory) as caught, MemoryLimit(config, ops, Recorder()):
        [np.ones(40 << 20, np.uint8), np.ones(60 << 20, np.uint8)]
    assert re.search(
        r"wants 60\.0 MiB, but [6-9]\d\.\d MiB are left \(by now; less when it was"
        r" requested\) of --memory-limit 67108864",
        str(caught.value),
    ), caught.value


def test_products_take_one_thread_inside_the_limit():
    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(2, "blas"):
        with MemoryLimit(limited(64 << 20), ops_module.make("cpu", "float32"), Recorder()):
            assert threads() == {1}
        assert threads() == {2}


def test_without_a_limit_the_array_is_named():
    ops = ops_module.make("cpu", "float32")
    message = r"\(1125899906842624,\) float32 .* wants 4194304.0 GiB"
    with pytest.raises(OutOfMemory, match=message), MemoryLimit(limited(), ops, Recorder()):
        ops.empty((1 << 50,), label="weights")


def test_on_a_gpu_the_pool_gets_the_limit():
    limits = []

    class Pool:
        def set_limit(self, size):
            limits.append(size)

        def used_bytes(self):
            return 700

    cupy = SimpleNamespace(get_default_memory_pool=Pool)
    error = MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 700 bytes).")
    message = r"wants 1.0 KiB, but 300 B are left of --memory-limit 1000 "
    config, _ = resolve(limited(1000), 1)
    with (
        pytest.raises(OutOfMemory, match=message),
        MemoryLimit(config, SimpleNamespace(device="cuda", xp=cupy), Recorder()),
    ):
        raise error
    assert limits == [1000, 0]


def test_the_smallest_layout_that_fits_is_found():
    config, _ = resolve(
        limited(
            model=ModelConfig(layers=1, d_model=256, heads=8, ffn=32768, seq_len=16),
            train=TrainConfig(batch_size=4),
            grid=GridConfig(dp=1, pp=1, tp=1, num_microbatches=1),
        ),
        1,
    )
    ((grid, peak),) = smallest_layouts(config, 100 << 20)
    assert (grid.dp, grid.pp, grid.tp) == (1, 1, 4)
    assert peak * memory_limit.HEADROOM <= 100 << 20
    assert smallest_layouts(config, 1 << 20) == []


def test_a_limit_below_the_prediction_is_named_even_where_the_run_passes(tmp_path):
    small = "--layers 1 --d-model 32 --heads 2 --seq-len 16 --steps 1 --sample-tokens 0".split()
    done = mpipar("train", *small, *TEXT, "--memory-limit", 100000, cwd=tmp_path).ended()
    assert "--memory-limit 100000 (97.7 KiB) is below the" in done.stdout
    assert tight(None, [1]) == tight(2, [1, 2]) == ""
