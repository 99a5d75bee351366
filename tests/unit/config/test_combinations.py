"""The table of illegal combinations of settings: its rows, and what they say."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import refusal

from mpipar import cli
from mpipar.config.resolve import broken_rules
from mpipar.errors import EXIT_USAGE
from mpipar.pipeline.csv_format import read_csv, write_csv
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.resolve import RULES

BY_NAME = {rule.name: rule for rule in RULES}
OF_FILE = "--schedule-csv 1f1b.csv --pp 2 --num-microbatches 4"
EXAMPLES = {  # row: (flags that break it, on so many ranks; flags that its sentence names)
    "head width": ("--heads 3", 1, "--heads 4"),
    "rotated pairs": ("--positions rope --d-model 12 --heads 4", 1, "--heads 2"),
    "groups of heads": ("--arch llama --kv-heads 3", 1, "--kv-heads 2"),
    "heads of GPT-2": ("--kv-heads 2", 1, "--arch llama"),
    "gate of GPT-2": ("--activation swiglu", 1, "--activation gelu"),
    "cut of a gate": ("--arch llama --ffn-cut reduce", 1, "--ffn-cut pair"),
    "cut of tokens": ("--ffn-cut gather --sequence-parallel", 1, "--ffn-cut pair"),
    "ring of pieces": ("--tp-matmul ring", 1, "--sequence-parallel"),
    "slowed rotations": ("--arch llama --config scaling.toml", 1, "--config usual.toml"),
    "longest row": ("--arch llama --config positions.toml", 1, "--seq-len 32"),
    "experts of a token": ("--experts 4 --experts-per-token 5", 1, "--experts-per-token 4"),
    "blocks of experts": ("--experts 4 --config interval.toml", 1, "--layers 5"),
    "number of ranks": ("--dp 2 --pp 2 --tp 2", 4, "--dp 1"),
    "heads of a rank": ("--heads 6 --d-model 96 --tp 4", 4, "--tp 2"),
    "kv heads of a rank": (
        "--arch llama --heads 6 --kv-heads 3 --d-model 96 --tp 2", 2, "--tp 1"
    ),
    "blocks of a rank": ("--pp 4 --layers 2", 4, "--pp 2"),
    "no layout": ("--dp 1", 7, "--dp 7"),
    "order of axes": ("--rank-order pp,dp,tp", 1, "--rank-order tp,cp,dp,pp"),
    "sum of the stages": ("--stage-layers 3,2 --pp 2", 2, "--stage-layers 3,1"),
    "rows of a step": ("--batch-size 30 --num-microbatches 4", 1, "--batch-size 32"),
    "method of one rank": ("--cp-attention gather", 2, "--cp 2"),
    "pieces of a row": ("--cp 2 --seq-len 63", 2, "--seq-len 64"),
    "heads for tokens": ("--cp 4 --cp-attention ulysses --tp 2", 8, "--cp-attention ring"),
    "ranks without experts": ("--ep 2 --dp 2", 2, "--experts 2"),
    "experts of a rank": ("--experts 4 --ep 3 --dp 3", 3, "--ep 1"),
    "ranks of experts": ("--experts 4 --ep 4 --dp 2", 2, "--ep 2"),
    "islands of replicas": ("--islands 3 --dp 4", 4, "--islands 2"),
    "experts over islands": ("--experts 4 --ep 4 --islands 2 --dp 4", 4, "--ep 2"),
    "layout of islands": ("--layout auto --islands 2", 2, "--layout dp=2"),
    "work of a step": ("--num-microbatches 16384", 1, "--num-microbatches 8"),
    "nothing to shard": ("--zero 1", 2, "--dp 2"),
    "kernels of a device": ("--kernels fused", 1, "--kernels numpy"),
    "fused kernels in float64": (
        "--device cuda --kernels fused --dtype float64", 1, "--dtype float32"
    ),
    "products of 16 bits": ("--device cuda --gemm tile", 1, "--dtype bfloat16"),
    "scale that rounds": ("--dtype float16 --loss-scale 1000", 1, "--loss-scale 1024"),
    "folder to resume in": ("--resume auto", 1, "--out runs/mine"),
    "two sources": ("--init-from runs/0001 --resume runs/0002", 1, "--resume never"),
    "late warning": ("--hang-warn 90 --hang-stop 80", 1, "--hang-warn 80"),
    "steps of a trace": ("--trace 12:10", 1, "--trace 10:12"),
    "trace after the end": ("--trace 600", 1, "--trace 500"),
    "costs for nothing": ("--machine costs.json", 1, "--layout auto"),
    "passes of a step": (
        "--schedule interleaved --chunks 64 --num-microbatches 8192", 1, "--num-microbatches 64"
    ),
    "chunks of a schedule": ("--schedule 1f1b --chunks 2", 1, "--schedule interleaved"),
    "streams of a schedule": (
        "--schedule dualpipe-v --pp 2 --num-microbatches 3", 2, "--num-microbatches 4"
    ),
    "number of stages": ("--stage-layers 2,1,1 --pp 2", 2, "--stage-layers 2,2"),
    "schedule and a file": (f"{OF_FILE} --schedule gpipe", 2, "--schedule 1f1b"),
    "chunks and a file": (f"{OF_FILE} --chunks 2", 2, None),
    "pp of a file": ("--schedule-csv 1f1b.csv --pp 1", 2, "--pp 2"),
    "num microbatches of a file": (
        "--schedule-csv 1f1b.csv --pp 2 --num-microbatches 8", 2, "--num-microbatches 4"
    ),
}  # fmt: skip
FILES = {
    "scaling.toml": "rope-scaling = [8.0, 4.0, 1.0, 64.0]",
    "usual.toml": "rope-scaling = [8.0, 1.0, 4.0, 64.0]",
    "positions.toml": "max-positions = 32",
    "interval.toml": "expert-interval = 5",
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A folder, entered, with the files that EXAMPLES name."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_csv(make_schedule("1f1b", 2, 4), tmp_path / "1f1b.csv")


def broken(words, ranks):
    """The refusals of these flags on so many ranks, each with the row that made it."""
    found = cli.context_of(None, "train", list(words))
    parsed, path = found.parsed, found.parsed.config.grid.schedule_csv
    facts = {"machine": found.args.machine, "chooses_layout": parsed.chooses_layout}
    facts["csv"] = path and read_csv(Path(path))
    found = broken_rules(parsed.config, ranks, RULES, parsed.bad, **facts)
    return list(parsed.problems), {rule.name: rule.problem(values) for rule, values in found}


def test_every_row_has_an_example():
    assert [rule.name for rule in RULES] == [*EXAMPLES]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_breaks_its_row_alone_and_its_sentence_helps(name):
    words, ranks, cure = EXAMPLES[name]
    problems, found = broken(words.split(), ranks)
    assert (problems, [*found]) == ([], [name])
    assert re.match(r"(--)?[a-z-]+.*: .*; \S", found[name]), found
    if cure:
        named = cure.split()[0]
        assert (
            named[2:].replace("-", "_") in BY_NAME[name].fields
            or named in found[name]
            or (named == "--config")
        )
        assert broken([*words.split(), *cure.split()], ranks) == ([], {})
    error = refusal("train", *words.split(), ranks=ranks)
    assert error.exit_code == EXIT_USAGE
    assert found[name] in error.problems


def test_axes_that_could_not_be_chosen_are_not_judged():
    problems, found = broken("--dp 3 --stage-layers 2,2".split(), 4)
    assert (problems, [*found]) == ([], ["number of ranks"])


@given(st.lists(st.sampled_from([*EXAMPLES]), min_size=2, max_size=4, unique=True))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_rows_meet(names):
    """Whatever else is wrong, a row can say what is."""
    words = " ".join(EXAMPLES[name][0] for name in names).split()
    for text in broken(words, max(EXAMPLES[name][1] for name in names))[1].values():
        assert re.match(r".+: .+; ", text)
        assert "{" not in text
