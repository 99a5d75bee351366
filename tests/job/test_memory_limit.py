"""--memory-limit: an error names what does not fit; on more ranks it trains."""

import re
import resource
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fault_table import fault
from program import block_of, mpipar
from threadpoolctl import threadpool_info, threadpool_limits

from mpipar import ops as ops_module
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.errors import OutOfMemory
from mpipar.run.memory_limit import data_bytes, memory_limit

# One layer of 17 million parameters: 68 MB each for weights, gradients and two moments.
WIDE = """--layers 1 --d-model 256 --heads 8 --ffn 32768 --seq-len 16 --batch-size 4
    --num-microbatches 1 --steps 1 --sample-tokens 0""".split()
LIMIT = 190 << 20


@pytest.mark.slow
@fault(39, "a layer too large for the memory of a rank", 69)
def test_a_layer_too_large_for_one_rank_is_named_and_trains_on_two(tmp_path):
    text = tmp_path / "text"
    text.write_text("A short text: its held-out end is read to the last row.\n" * 40)
    limited = ("train", *WIDE, "--data", text, "--memory-limit", LIMIT)
    alone = mpipar(*limited, cwd=tmp_path)
    block_of(alone, 69, "out of memory: optimizer (17144576,) float32", "wants 65.4 MiB", "--tp")
    done = mpipar(*limited, "--layout", "tp=2", ranks=2, cwd=tmp_path).ended()
    assert "held-out loss" in done.stdout


def test_a_pass_that_does_not_fit_names_the_layer(tmp_path):
    words = "--layers 6 --d-model 64 --heads 2 --seq-len 256 --batch-size 32 --num-microbatches 1"
    result = mpipar("train", *words.split(), "--steps", 1, "--memory-limit", 60 << 20, cwd=tmp_path)
    block = block_of(result, 69)
    assert re.search(
        r"of block\d\.\S+ \(mpipar/\S+:\d+\) wants [\d.]+ MiB, but less is left",
        block,
    ), block
    assert "mpipar explain" in block


def limited(budget=None, **parts):
    """The configuration of one rank with a limit."""
    config = Config()
    return replace(config, run=replace(config.run, memory_limit=budget), **parts)


def test_the_limit_is_taken_back():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ops = ops_module.make("cpu", "float32")
    with memory_limit(limited(64 << 20), ops):
        # 16 MiB beside the budget are for the rest of the process
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        assert limit == pytest.approx(data_bytes() + (80 << 20), abs=4 << 20)
        np.ones(32 << 20, np.uint8)
        with pytest.raises(MemoryError):
            np.ones(128 << 20, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_products_take_one_thread_inside_the_limit():
    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(2, "blas"):
        with memory_limit(limited(64 << 20), ops_module.make("cpu", "float32")):
            assert threads() == {1}
        assert threads() == {2}


def test_without_a_limit_the_array_is_named():
    ops = ops_module.make("cpu", "float32")
    message = r"\(1125899906842624,\) float32 .* wants 4194304.0 GiB"
    with pytest.raises(OutOfMemory, match=message), memory_limit(limited(), ops):
        ops.empty((1 << 50,), label="weights")


def test_on_a_gpu_the_pool_gets_the_limit():
    limits = []

    class Pool:
        def set_limit(self, size):
            limits.append(size)

    cupy = SimpleNamespace(get_default_memory_pool=Pool)
    error = MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 700 bytes).")
    message = "wants 1.0 KiB, but less is left of --memory-limit 1000;"
    config, _ = resolve(limited(1000), 1)
    with (
        pytest.raises(OutOfMemory, match=message),
        memory_limit(config, SimpleNamespace(device="cuda", xp=cupy)),
    ):
        raise error
    assert limits == [1000, 0]
