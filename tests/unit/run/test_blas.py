"""The BLAS kernels of a process: by its vector units, before NumPy is loaded."""

import sys

import pytest
from helpers import run_ranks
from program import LIMIT, TEXT, block_of, environment, mpipar

from mpipar.errors import EnvironmentProblem
from mpipar.run.process import blas

NEW, OLD = blas.KERNELS["SkylakeX"], blas.KERNELS["Haswell"]
TINY = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 0 --eval-tokens 20 --steps 2""".split()


# A rank that starts with another environment than the first.
PLACE = """
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    os.environ["OPENBLAS_CORETYPE"] = "Prescott"
"""


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Set the vector units of the processor; NumPy counts as not loaded."""
    monkeypatch.setattr(blas, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delitem(sys.modules, "numpy")

    def set_units(*units):
        blas.CPUINFO.write_text(f"model name\t: A CPU\nflags\t\t: fpu {' '.join(units)}\n")

    return set_units


def chosen(**environ):
    blas.choose_kernels(environ)
    return environ.get(blas.VARIABLE)


def test_flags_are_those_of_the_first_processor(monkeypatch, tmp_path):
    text = "model name\t: A CPU\nflags\t\t: fma avx2\n\nmodel name\t: B\nflags\t: avx512f\n"
    monkeypatch.setattr(blas, "CPUINFO", tmp_path / "cpuinfo")
    assert blas.processor() == ("", frozenset())
    blas.CPUINFO.write_text(text)
    assert blas.processor() == ("A CPU", {"avx2", "fma"})


@pytest.mark.parametrize(
    ("units", "kernels"),
    [(NEW, "SkylakeX"), (OLD, "Haswell"), ((*NEW, "avx512_bf16"), "SkylakeX"), (("avx2",), None)],
)
def test_the_vector_units_say_the_kernels(processor, units, kernels):
    assert chosen() is None  # the processor is unknown
    processor(*units)
    assert chosen() == kernels
    sys.modules["numpy"] = None  # loaded: then it is too late
    assert chosen() is None


def test_a_name_that_the_user_has_set_wins(processor):
    processor(*NEW)
    for name in ("Haswell", "HASWELL", "Nehalem"):
        assert chosen(OPENBLAS_CORETYPE=name) == name


def test_kernels_that_the_processor_cannot_run_are_refused(processor):
    processor(*OLD)
    for name in ("SkylakeX", "SKYLAKEX"):
        with pytest.raises(EnvironmentProblem, match=f"{name}: the processor .*A CPU.* avx512f"):
            chosen(OPENBLAS_CORETYPE=name)


def test_ranks_with_other_kernels_do_not_train_together():
    """They would round differently."""
    code = f"{PLACE}import mpipar.__main__; mpipar.__main__.main()"
    words = [sys.executable, "-c", code, "train", *TINY, *TEXT]
    result = run_ranks(2, words, LIMIT, environment({blas.VARIABLE: "Nehalem"}))
    block_of(result, 69, blas.VARIABLE, "Nehalem", "Prescott")


def test_doctor_multiplies_with_the_kernels_of_the_vector_units(monkeypatch):
    monkeypatch.delenv(blas.VARIABLE)
    result = mpipar("doctor").ended()
    name = blas.choice(blas.processor()[1])
    assert name is None or f"kernels for {name}" in result.stdout, result.tail()
