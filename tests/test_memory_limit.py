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
from mpipar.comm.record import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.errors import OutOfMemory
from mpipar.run.memory_limit import MemoryLimit, data_bytes

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
        r"of block\d\.\S+ \(mpipar/\S+:\d+\), forward pass of stage 0, microbatch 0,"
        r" wants [\d.]+ MiB, but [\d.]+ \w+ are left",
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
