"""Which loops of BLAS a job runs: found before NumPy is loaded, the same on all ranks, and kept."""

import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from helpers import REPOSITORY
from program import TEXT, mpipar, one_block

from mpipar.commands import loops
from mpipar.errors import EnvironmentProblem
from mpipar.job import blas, trial

NEW, OLD = (*blas.AVX2, *blas.AVX512), blas.AVX2
TINY = """--layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 2
    --sample-tokens 0 --eval-tokens 20 --steps 2""".split()
RATES = {"Zen": 108.0, "SkylakeX": 205.0}


def fact(host="a", units=NEW, **more):
    return {"host": host, "processor": "a processor", "units": units, **more}


def test_units_are_those_of_the_first_processor(monkeypatch, tmp_path):
    text = "model name\t: A CPU\nflags\t\t: fpu fma avx2 sse\n\nmodel name\t: B\nflags\t: avx512f\n"
    monkeypatch.setattr(blas, "CPUINFO", tmp_path / "cpuinfo")
    assert blas.processor() == ("", ())
    blas.CPUINFO.write_text(text)
    assert blas.processor() == ("A CPU", ("avx2", "fma"))


@pytest.mark.parametrize(("rates", "units", "chosen"), [
    (RATES, NEW, "SkylakeX"), (RATES, OLD, "Zen"), (RATES, (), None), ({}, NEW, None),
    ({"Zen": 100.0, "SkylakeX": 105.0}, NEW, "Zen"),  # noise does not change OpenBLAS's own choice
    ({"SkylakeX": 205.0, "Haswell": 110.0}, OLD, "Haswell"), ({"armv8": 90.0}, (), None),
])  # fmt: skip
def test_the_fastest_loops_that_every_host_can_run(rates, units, chosen):
    assert blas.fastest(rates, units) == chosen


def test_every_architecture_names_units_that_are_read():
    assert {unit for units in blas.ARCHITECTURES.values() for unit in units} == set(blas.UNITS)
    assert all(name in blas.ARCHITECTURES for name in blas.TRIED)
    assert blas.untried("Zen", NEW) == "SkylakeX"
    assert blas.untried("Zen", OLD) is blas.untried("SkylakeX", NEW) is None
    assert blas.untried("Prescott", OLD) == "Haswell"


# --- the choice of a job


@pytest.mark.parametrize(("hosts", "asked", "named", "found"), [
    ([NEW, NEW], None, None, ("SkylakeX", "from a trial: Zen 108 GFLOP/s, SkylakeX 205 GFLOP/s")),
    ([NEW, OLD], None, None, ("Zen", "not every host has the vector units of the fastest")),
    ([NEW, NEW], None, "Haswell", ("Haswell", "as OPENBLAS_CORETYPE=Haswell says")),
    ([NEW, NEW], None, "HASWELL", ("Haswell", "as OPENBLAS_CORETYPE=HASWELL says")),
    ([NEW, NEW], "Zen", "Haswell", ("Zen", "as --blas-arch says")),
    ([(), ()], None, "NeoverseN1", ("NeoverseN1", "as OPENBLAS_CORETYPE=NeoverseN1 says")),
])  # fmt: skip
def test_one_choice_for_the_job(hosts, asked, named, found):
    facts = [fact(f"host{number}", units, saved=None, rates=RATES)
             for number, units in enumerate(hosts)]
    name, words = loops.decide(facts, asked, named)
    assert name == found[0]
    assert found[1] in words


def test_a_run_keeps_its_loops_where_they_can_run():
    facts = [fact(saved="Zen", rates=RATES), fact(saved="SkylakeX", rates=RATES)]
    assert loops.decide(facts, None, None) == ("Zen", "as before")
    assert loops.decide(facts, None, "Haswell")[1].endswith("says; before: Zen")
    facts = [fact(saved="SkylakeX", rates=RATES), fact("b", OLD)]
    name, words = loops.decide(facts, None, None)
    assert name == "Zen"
    assert words.endswith("; before: SkylakeX")


def test_loops_that_a_host_cannot_run_are_refused():
    facts = [fact(saved=None, rates={}), fact("b", OLD)]
    with pytest.raises(EnvironmentProblem, match="OPENBLAS_CORETYPE=SkylakeX: the processor of b"):
        loops.decide(facts, None, "SkylakeX")
    with pytest.raises(EnvironmentProblem, match="OPENBLAS_CORETYPE=SKYLAKEX: the processor of b"):
        loops.decide(facts, None, "SKYLAKEX")
    assert "--blas-arch SkylakeX: the processor of b (a processor) has no avx512f" in (
        loops.flag_problem(facts, "SkylakeX"))
    assert "--blas-arch Skylake: must be one of Haswell, " in loops.flag_problem(facts, "Skylake")
    assert "set OPENBLAS_CORETYPE" in loops.flag_problem(facts, "")
    assert loops.flag_problem(facts, "Zen") == ""


def test_the_run_that_goes_on_says_its_loops(tmp_path):
    step = tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    for text, found in (('blas-arch = "Zen"\n', "Zen"), ("seed = 1\n", None), ("?", None),
                        ('blas-arch = ["Zen"]\n', None)):
        (tmp_path / "config.toml").write_text(text)
        for run in ({"resume": str(tmp_path)}, {"resume": str(step)},
                    {"resume": "auto", "out": str(tmp_path)}):
            assert loops.saved_loops(SimpleNamespace(**{"out": None, "run_name": None} | run)) == (
                found)
    assert loops.saved_loops(SimpleNamespace(resume="never")) is None
    missing = SimpleNamespace(resume=str(tmp_path / "none"))
    assert loops.saved_loops(missing) is None


# --- rates: measured once per machine


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """Architectures that were tried, in place of child processes; the cache is a new folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(blas, "processor", lambda: ("a processor", NEW))
    tried = []

    def trial(architecture=None):
        tried.append(architecture)
        name = architecture or "Zen"
        return {"library": "openblas", "architecture": name, "gflops": RATES[name]}

    monkeypatch.setattr(blas, "_trial", trial)
    return tried


def test_rates_are_measured_once(trials, tmp_path):
    assert blas.measured_rates() == blas.measured_rates() == RATES
    assert trials == [None, "SkylakeX"]
    (path,) = (tmp_path / "mpipar" / "blas").iterdir()
    path.write_text("damaged")
    assert blas.measured_rates() == RATES
    assert len(trials) == 4


def test_the_first_of_two_jobs_keeps_its_rates(trials, tmp_path, monkeypatch):
    first = {"Zen": 1.0}
    measure = blas._measure

    def late(units):
        blas._measure = measure
        monkeypatch.setattr(blas, "_measure", lambda units: (first, True))
        blas.measured_rates()
        return RATES, True

    monkeypatch.setattr(blas, "_measure", late)
    assert blas.measured_rates() == first
    assert len(list((tmp_path / "mpipar" / "blas").iterdir())) == 1


@pytest.mark.parametrize("answer", [
    None, {"library": "mkl", "architecture": None, "gflops": 1.0}])
def test_another_blas_is_left_alone(trials, monkeypatch, answer):
    monkeypatch.setattr(blas, "_trial", lambda architecture=None: answer)
    assert blas.measured_rates() == {}


@pytest.mark.parametrize(("failing", "found"), [(None, {}), ("SkylakeX", {"Zen": RATES["Zen"]})])
def test_a_trial_that_was_interrupted_comes_again(trials, tmp_path, monkeypatch, failing, found):
    whole = blas._trial
    monkeypatch.setattr(blas, "_trial", lambda name=None: None if name == failing else whole(name))
    assert blas.measured_rates() == found
    assert not list((tmp_path / "mpipar" / "blas").iterdir())
    monkeypatch.setattr(blas, "_trial", whole)
    assert blas.measured_rates() == RATES


def test_a_trial_that_fails_costs_nothing_but_its_rate(trials, monkeypatch):
    def broken(*words, **options):
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", broken)
    assert blas._trial("SkylakeX") is None


def test_a_child_process_says_its_loops():
    found = blas._trial()
    assert found["gflops"] > 0
    assert found["library"]


# --- train


def test_the_choice_is_made_before_numpy_is_loaded():
    code = ("import sys\nimport mpipar.cli, mpipar.commands.loops\n"
            "assert 'numpy' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)


@pytest.mark.slow
def test_a_run_chooses_its_loops_and_keeps_them(tmp_path, monkeypatch):
    monkeypatch.delenv(blas.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["train", *TINY, *TEXT, "--out", tmp_path / "run"]
    first = mpipar(*words, ranks=2)
    assert "\nBLAS: loops for " in first.stdout, first.tail()
    assert " GFLOP/s" in first.stdout
    (kept,) = (tmp_path / "mpipar" / "blas").iterdir()
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["blas-arch"] in kept.read_text()
    again = mpipar(*words, "--steps", 3, "--resume", "auto", ranks=2)
    assert f"\nBLAS: loops for {config['blas-arch']}, as before\n" in again.stdout, again.tail()


@pytest.mark.slow
def test_loops_that_the_flag_does_not_take_are_not_written_into_the_configuration(
        tmp_path, monkeypatch):
    monkeypatch.setenv(blas.VARIABLE, "Nehalem")
    first = mpipar("train", *TINY, *TEXT, "--steps", 1, "--out", tmp_path / "run")
    assert "\nBLAS: loops for Nehalem, as OPENBLAS_CORETYPE=Nehalem says" in first.stdout
    again = mpipar("train", "--config", tmp_path / "run" / "config.toml", "--steps", 1,
                   "--out", tmp_path / "again")
    assert again.returncode == 0, again.tail()


def test_a_flag_that_names_no_loops_is_refused_with_the_other_problems():
    result = mpipar("train", *TINY, *TEXT, "--blas-arch", "Pentium", "--batch-size", 7)
    code, block = one_block(result)
    assert code == 2
    assert "--blas-arch Pentium: must be one of Haswell, " in block
    assert "--batch-size 7: must be a multiple" in block


# --- threads


@pytest.mark.parametrize(("slowdown", "limited"), [(0.6, False), (7.8, True)])
def test_one_thread_where_several_would_wait_for_a_core(monkeypatch, slowdown, limited):
    called = []
    monkeypatch.setattr(trial, "slowdown", lambda threads: slowdown)
    monkeypatch.setattr(blas, "one_thread", lambda: called.append(1))
    monkeypatch.setattr(loops.mpi, "gather_facts", lambda world, fact: [0.5, fact])
    session = SimpleNamespace(presets={"OPENBLAS_NUM_THREADS": "2"}, world=None, notes=[])
    loops.settle_threads(session, "cpu")
    assert bool(called) == limited
    assert ("one thread per rank" in session.notes[0]) == limited
    session.presets, session.notes = {}, []  # the user has set a number
    loops.settle_threads(session, "cpu")
    assert session.notes == []


def test_the_trial_of_threads_takes_turns(monkeypatch):
    monkeypatch.setattr(trial, "ROWS", 8)
    assert trial.slowdown(2) > 0
