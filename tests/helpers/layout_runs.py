"""One small training run for each layout, shared by all tests of a session that inspect it."""

import numpy as np
import pytest
from program import layout_flags, mpipar

# 6 heads of width 3, 7 tokens: odd on purpose; ffn 31 and 256 bytes are padded for 3 ranks.
SMALL = """train --dtype float64 --optimizer sgd --lr 0.5 --warmup-steps 2 --steps 5 --seed 5
    --layers 4 --d-model 18 --heads 6 --ffn 31 --seq-len 7 --batch-size 8 --num-microbatches 2
    --log-interval 2 --sample-tokens 12""".split()
# Options that must not change a digit.
OPTIONS = {(2, 2, 2): "--num-microbatches 4 --rank-order tp,cp,dp,pp"}


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A short English text, the same everywhere."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = "the cat sat on the mat and a dog ran to the old red barn while it was raining".split()
    rng = np.random.default_rng(3)
    path.write_text(" ".join(rng.choice(words, 800)))
    return path


@pytest.fixture(scope="session")
def run_of(tmp_path_factory, text_file):
    """A function: layout -> (run folder, what was printed); each layout runs once."""
    done = {}

    def run(layout):
        if layout not in done:
            folder = tmp_path_factory.mktemp("runs") / "run"
            result = mpipar(
                *SMALL,
                "--data",
                text_file,
                "--out",
                folder,
                *layout_flags(layout),
                *OPTIONS.get(layout, "").split(),
                ranks=int(np.prod(layout)),
            ).ended()
            assert result.stderr == "", result.tail()
            done[layout] = folder, result.stdout
        return done[layout]

    return run
