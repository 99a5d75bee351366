"""bench.generate runs beside transformers, prints its table, and does not time wrong texts."""

import json
import sys

import pytest
from helpers import run_command

WORDS = "--presets tiny --prompt-tokens 6 --new-tokens 4 --repeats 1 --batch-sizes 2".split()
WRONG_TOKENS = """
from bench import generate
from mpipar.inference import generate as generation
from mpipar.job.session import guard
plain = generation.draw
generation.draw = lambda *arguments: (plain(*arguments) + 1) % 256
guard(generate.main)
"""


@pytest.mark.peers
def test_one_rank_is_timed_beside_transformers(tmp_path):
    path = tmp_path / "generate.json"
    done = run_command([sys.executable, "-m", "bench.generate", *WORDS, "--json", path], 100)
    assert done.returncode == 0, done.tail()
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"mpipar numpy", "transformers"} <= rows.keys()
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert row["over_transformers"] == pytest.approx(
            row["tokens_per_s"] / rows["transformers"]["tokens_per_s"])


@pytest.mark.peers
def test_wrong_texts_are_not_timed():
    done = run_command([sys.executable, "-c", WRONG_TOKENS, *WORDS], 100)
    assert done.returncode == 1, done.tail()
    assert "not timed: tiny, mpipar numpy: another token is likelier" in done.stderr


def test_a_token_with_a_cache_and_without_it(tmp_path):
    path = tmp_path / "contexts.json"
    argv = [sys.executable, "-m", "bench.generate", *WORDS, "--contexts", "8", "100000"]
    done = run_command([*argv, "--json", path], 100)
    assert done.returncode == 0, done.tail()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["context"] == 8
    assert row["times"] == pytest.approx(
        row["with_cache_tokens_per_s"] / row["without_tokens_per_s"])
