"""The BLAS kernels of a job: chosen before NumPy is loaded, the same on all ranks, and kept."""

import json
import tomllib
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY
from program import TEXT, block_of, mpipar

from bench import blas_kernels
from mpipar.commands import blas_kernels as choice
from mpipar.errors import EnvironmentProblem
from mpipar.job import blas

NEW, OLD = blas.AVX512, blas.AVX2
TINY = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 0 --eval-tokens 20 --steps 2""".split()
LACKS = "BLAS: NumPy's library has no kernels for SkylakeX:"
RESULTS = REPOSITORY / "bench" / "results"


def fact(host="a", units=NEW, **more):
    return {"host": host, "processor": "a processor", "units": units, **more}


def test_units_are_those_of_the_first_processor(monkeypatch, tmp_path):
    text = "model name\t: A CPU\nflags\t\t: fpu fma avx2 sse\n\nmodel name\t: B\nflags\t: avx512f\n"
    monkeypatch.setattr(blas, "CPUINFO", tmp_path / "cpuinfo")
    assert blas.processor() == ("", ())
    blas.CPUINFO.write_text(text)
    assert blas.processor() == ("A CPU", ("avx2", "fma"))


@pytest.mark.parametrize(("units", "chosen"), [
    (NEW, "SkylakeX"), (OLD, "Haswell"), ((*NEW, "avx512_bf16"), "SkylakeX"), ((), None),
    (("avx2",), None),
])  # fmt: skip
def test_the_vector_units_say_the_kernels(units, chosen):
    assert blas.choice(units) == chosen


def test_every_architecture_names_units_that_are_read():
    assert {unit for units in blas.ARCHITECTURES.values() for unit in units} == set(blas.UNITS)
    assert all(name in blas.ARCHITECTURES for name in blas.CHOICES)
    assert blas.wider("Zen", NEW) == "SkylakeX"
    assert blas.wider("Prescott", OLD) == "Haswell"
    for architecture, units in (("Zen", OLD), ("SkylakeX", NEW), ("Cooperlake", NEW), ("Zen", ())):
        assert blas.wider(architecture, units) is None


def test_the_choice_is_the_fastest_on_every_processor_that_was_measured():
    """Rates of the same kernels differ by a few percent from one process to the next."""
    rows = json.loads((RESULTS / "blas_kernels.json").read_text())["rows"]
    places = {(row["processor"], row["vector_units"]) for row in rows}
    for place in places:
        own = [row for row in rows if (row["processor"], row["vector_units"]) == place]
        name = blas.choice(place[1].split())
        (chosen,) = (row for row in own if row["asked"] == name)
        for dtype in blas_kernels.DTYPES:
            best = max(row[f"{dtype}_gflops"] for row in own)
            assert chosen[f"{dtype}_gflops"] > 0.9 * best, (place, dtype)


# --- the choice of a job


@pytest.mark.parametrize(("hosts", "asked", "named", "found"), [
    ([NEW, NEW], None, None, ("SkylakeX", "by the vector units that all hosts have")),
    ([NEW, OLD], None, None, ("Haswell", "by the vector units that all hosts have")),
    ([NEW, NEW], None, "Haswell", ("Haswell", "as OPENBLAS_CORETYPE=Haswell says")),
    ([NEW, NEW], None, "HASWELL", ("Haswell", "as OPENBLAS_CORETYPE=HASWELL says")),
    ([NEW, NEW], "Zen", "Haswell", ("Zen", "as --blas-arch says")),
    ([(), ()], None, "NeoverseN1", ("NeoverseN1", "as OPENBLAS_CORETYPE=NeoverseN1 says")),
])  # fmt: skip
def test_one_choice_for_the_job(hosts, asked, named, found):
    facts = [fact(f"host{number}", units, saved=None) for number, units in enumerate(hosts)]
    name, words = choice.decide(facts, asked, named)
    assert name == found[0]
    assert found[1] in words


def test_a_run_keeps_its_loops_where_they_can_run():
    facts = [fact(saved="Zen"), fact(saved="SkylakeX")]
    assert choice.decide(facts, None, None) == ("Zen", "as before")
    assert choice.decide(facts, None, "Haswell")[1].endswith("says; before: Zen")
    facts = [fact(saved="SkylakeX"), fact("b", OLD)]
    name, words = choice.decide(facts, None, None)
    assert name == "Haswell"
    assert words.endswith("; before: SkylakeX")


def test_loops_that_a_host_cannot_run_are_refused():
    facts = [fact(saved=None), fact("b", OLD)]
    with pytest.raises(EnvironmentProblem, match="OPENBLAS_CORETYPE=SkylakeX: the processor of b"):
        choice.decide(facts, None, "SkylakeX")
    with pytest.raises(EnvironmentProblem, match="OPENBLAS_CORETYPE=SKYLAKEX: the processor of b"):
        choice.decide(facts, None, "SKYLAKEX")
    assert "--blas-arch SkylakeX: the processor of b (a processor) has no avx512f" in (
        choice.unfit("--blas-arch SkylakeX", "SkylakeX", facts)
    )
    assert choice.unfit("--blas-arch Zen", "Zen", facts) == ""


def test_the_run_that_goes_on_says_its_loops(tmp_path):
    step = tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    for text, found in (
        ('blas-arch = "Zen"\n', "Zen"),
        ("seed = 1\n", None),
        ("?", None),
        ('blas-arch = ["Zen"]\n', None),
    ):
        (tmp_path / "config.toml").write_text(text)
        for run in (
            {"resume": str(tmp_path)},
            {"resume": str(step)},
            {"resume": "auto", "out": str(tmp_path)},
        ):
            started = SimpleNamespace(**{"out": None, "run_name": None} | run)
            assert choice.saved_kernels(started) == found
    assert choice.saved_kernels(SimpleNamespace(resume="never")) is None
    missing = SimpleNamespace(resume=str(tmp_path / "none"))
    assert choice.saved_kernels(missing) is None


# --- what runs, once NumPy is loaded


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("SkylakeX", []),
        ("SKYLAKEX", []),
        ("Zen", [f"{LACKS} openblas 0.3.31, kernels for Zen"]),
        (None, [f"{LACKS} openblas 0.3.31"]),
    ],
)
def test_other_kernels_than_the_chosen_are_said(monkeypatch, architecture, said):
    pool = {"internal_api": "openblas", "version": "0.3.31.188.0", "architecture": architecture}
    monkeypatch.setattr(blas, "pools", lambda: [pool])
    session = SimpleNamespace(notes=[])
    assert choice.loaded_facts(session, "SkylakeX") == {"BLAS": blas.shown(pool)}
    assert session.notes == said
    assert choice.loaded_facts(session, None) == {}


def test_the_measurement_keeps_other_processors(tmp_path):
    path, own = tmp_path / "rows.json", {"processor": "a", "vector_units": "avx2"}
    assert blas_kernels.with_others(str(path), [own]) == [own]
    other = own | {"vector_units": "avx2 fma"}
    path.write_text(json.dumps({"rows": [own | {"old": 1}, other]}))
    assert blas_kernels.with_others(str(path), [own]) == [other, own]


def test_a_process_says_its_kernels():
    found = blas_kernels.process(blas_kernels.OWN)
    assert found["runs"]
    assert found["float32"] > 0 < found["float64"]


# --- train


@pytest.mark.slow
def test_a_run_chooses_its_loops_and_keeps_them(tmp_path, monkeypatch):
    monkeypatch.delenv(blas.VARIABLE)
    words = ["train", *TINY, *TEXT, "--out", tmp_path / "run"]
    first = mpipar(*words, ranks=2)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["blas-arch"] == blas.choice(blas.processor()[1])
    assert f"\nBLAS: kernels for {config['blas-arch']}, by the vector units" in first.stdout
    again = mpipar(*words, "--steps", 3, "--resume", "auto", ranks=2)
    assert f"\nBLAS: kernels for {config['blas-arch']}, as before\n" in again.stdout, again.tail()


@pytest.mark.slow
def test_loops_that_the_flag_does_not_take_are_not_written_into_the_configuration(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(blas.VARIABLE, "Nehalem")
    first = mpipar("train", *TINY, *TEXT, "--steps", 1, "--out", tmp_path / "run")
    assert "\nBLAS: kernels for Nehalem, as OPENBLAS_CORETYPE=Nehalem says" in first.stdout
    mpipar(
        "train",
        "--config",
        tmp_path / "run" / "config.toml",
        "--steps",
        1,
        "--out",
        tmp_path / "again",
    ).ended()


def test_a_flag_that_names_no_loops_is_refused_with_the_other_problems():
    result = mpipar("train", *TINY, *TEXT, "--blas-arch", "Pentium", "--batch-size", 7)
    block_of(result, 2, "--blas-arch 'Pentium': must be one of Haswell, ", "--batch-size 7 with")


# --- threads


@pytest.mark.parametrize(("slowdown", "limited"), [(0.6, False), (7.8, True)])
def test_one_thread_where_several_would_wait_for_a_core(monkeypatch, slowdown, limited):
    called = []
    monkeypatch.setattr(blas, "slowdown", lambda threads: slowdown)
    monkeypatch.setattr(blas, "one_thread", lambda: called.append(1))
    monkeypatch.setattr(choice, "all_gather_facts", lambda world, fact: [0.5, fact])
    session = SimpleNamespace(presets={"OPENBLAS_NUM_THREADS": "2"}, world=None, notes=[])
    choice.settle_threads(session, "cpu")
    assert bool(called) == limited
    assert ("one thread per rank" in session.notes[0]) == limited
    session.presets, session.notes = {}, []  # the user has set a number
    choice.settle_threads(session, "cpu")
    assert session.notes == []


def test_the_trial_of_threads_takes_turns(monkeypatch):
    monkeypatch.setattr(blas, "ROWS", 8)
    assert blas.slowdown(2) > 0
