"""The programs of bench/: names, tables and files, claims, what they refuse to time."""

import json
import sys

import pytest
from helpers import run_command, run_ranks
from one_rank import SESSION

from bench import claims, generate, matmul, results
from bench.__main__ import main
from mpipar.errors import EXIT_OUTPUT, EXIT_USAGE, OutputError, UsageError
from mpipar.run import generation

LIMIT = 100  # seconds
TEXTS = "--presets tiny --prompt-tokens 6 --new-tokens 4 --repeats 1 --batch-sizes 2"
PRODUCTS = "--tokens 21 --inner 10 --outer 13 --repeats 2 --dtype float64"


def measured(path, name, words, ranks=None):
    """The result file of a program."""
    argv = [sys.executable, "-m", "bench", name, *words.split(), "--json", str(path)]
    (run_ranks(ranks, argv, LIMIT) if ranks else run_command(argv, LIMIT)).ended()
    return json.loads(path.read_text())


# --- names, flags, files


def test_an_unknown_name_is_refused_with_the_next_one(capsys):
    assert main(["comapre"]) == EXIT_USAGE
    assert "did you mean compare?" in capsys.readouterr().err


def test_no_bench_measures_what_it_could_not_write(tmp_path):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "out.json")
    for words in (["barriers"], ["hybrids"]):  # on one rank, and on all together
        with pytest.raises(OutputError, match=place):
            claims.main([*words, "--json", place], SESSION)
    done = run_ranks(2, [sys.executable, "-m", "bench.recorder", "--json", place], timeout=60)
    assert done.returncode == EXIT_OUTPUT, done.tail()
    assert done.stderr.count(place) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("number", ["0", "1.5"])
def test_a_size_is_a_whole_number_above_zero(number):
    with pytest.raises(UsageError, match=f"--repeats: '{number}': must be a whole number above 0"):
        matmul.main.parse(["--repeats", number])


# --- what is wrong is not timed


def test_a_wrong_cut_is_not_timed():
    code = (
        "from bench import matmul; from mpipar.comm.group import Comm\n"
        "Comm.reduce_scatter = lambda self, x, name: x[self.group_rank]\n"
        "from mpipar.run.process.session import guard; guard(matmul.main)"
    )
    done = run_ranks(2, [sys.executable, "-c", code, *PRODUCTS.split()], timeout=LIMIT)
    assert done.returncode == 1, done.tail()
    assert "column_sp on grid 2, rank 0: dx is off by" in done.stdout
    assert "median_ms" not in done.stdout


@pytest.mark.slow
@pytest.mark.peers
def test_wrong_texts_are_not_timed(monkeypatch):
    plain = generation.draw
    monkeypatch.setattr(generation, "draw", lambda *arguments: (plain(*arguments) + 1) % 256)
    with pytest.raises(generate.WrongTextError, match="tiny, mpipar numpy: another token is") as no:
        generate.main(TEXTS.split(), SESSION)
    assert no.value.exit_code == 1


# --- tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "ranks", "first", "count"),
    [
        ("checkpoint", "--size 4M --repeats 2 --folder {}", 2, {"what": "write + fsync"}, 8),
        ("recorder", "--repeats 5 --steps 2", 2, {"operation": "all_reduce"}, 5),
        ("matmul", PRODUCTS, 4, {"cut": "column", "grid": "4"}, 10),
        ("generate", TEXTS, None, {"side": "mpipar numpy", "model": "tiny"}, None),
    ],
)
def test_a_program_measures_and_writes(name, words, ranks, first, count, tmp_path):
    rows = measured(tmp_path / "result.json", name, words.format(tmp_path), ranks)["rows"]
    assert first.items() <= rows[0].items()
    assert count in (None, len(rows))
    for row in rows:
        assert all(value > 0 for key, value in row.items() if key.endswith(("_ms", "_ns", "_s")))
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.peers
def test_one_rank_generates_beside_transformers(tmp_path):
    path = tmp_path / "generate.json"
    assert generate.main([*TEXTS.split(), "--json", str(path)], SESSION) == 0
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"mpipar numpy", "transformers"} <= rows.keys()
    for row in rows.values():
        assert row["over_transformers"] == pytest.approx(
            row["tokens_per_s"] / rows["transformers"]["tokens_per_s"]
        )


# --- the tables of bench.claims follow the formulas


M, L = 8, claims.MODEL["layers"]


@pytest.mark.slow
def test_tensor_parallel_barriers_do_not_depend_on_its_size():
    """A microbatch has 4 all-reduces a layer, embedding, head and loss; a step adds the norm."""
    barriers = {row["layout"]: row["collectives_per_step"] for row in claims.barriers()}
    for tp in (2, 8):
        assert barriers[f"tp {tp}"] == M * (4 * L + 3) + 1
        assert barriers[f"tp {tp} (ffn-cut gather)"] == M * (6 * L + 3) + 1
        # Embedding 2, head and loss 3; the replicated gradients and the norm, once a step.
        assert barriers[f"tp {tp} (sequence-parallel)"] == M * (10 * L + 5) + 2


def test_tensor_parallelism_divides_flops_and_not_barriers_or_the_width_of_the_stream():
    """For B 2, T 128, D 256, F 1024 in float32: 24 B T D^2 + 4 B T^2 D FLOPs forward."""
    rows = {row["tp"]: row for row in claims.scaling()}
    alone, sum_bytes = rows[1], 2 * 128 * 256 * 4
    assert alone["MFLOP"] * 1e6 == 3 * (24 * 2 * 128 * 256**2 + 4 * 2 * 128**2 * 256)
    assert alone["weights_KiB"] * 1024 == 12 * 256**2 * 4
    for tp in (2, 4, 8):
        row = rows[tp]
        assert row["MFLOP"] == alone["MFLOP"] / tp
        assert (row["times_ranks"], row["barriers"]) == (1, 4)
        assert row["sent_KiB"] * 1024 == 8 * (tp - 1) / tp * sum_bytes
        # Four arrays of the stream and the statistics of two norms stay whole.
        whole = 4 * sum_bytes + 4 * 2 * 128 * 4
        assert row["stash_KiB"] * 1024 == whole + (alone["stash_KiB"] * 1024 - whole) / tp


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "scaling"])
def test_result_files_without_times_are_what_the_code_says(name):
    path = results.ROOT / "bench" / "results" / f"claims_{name}.json"
    rows = claims.COMPUTED[name]()
    assert json.loads(path.read_text())["rows"] == rows, f"run python -m bench.claims {name}"
