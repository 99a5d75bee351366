"""docs/from-nothing.sh, run unchanged: from Python's documentation to a model of transformers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, find_launcher
from program import environment, metrics

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.text]
LIMIT = 420  # it takes a minute and a half on two cores; here other tests may run beside it


@pytest.mark.timeout(LIMIT + 30)
def test_from_nothing_to_a_model_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="text: transformers is not installed")
    if find_launcher() is None or not shutil.which("pkill"):
        pytest.skip("no mpiexec, or no pkill")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = REPOSITORY / "docs" / "from-nothing.sh"
    result = subprocess.run(
        ["bash", script, tmp_path / "here"],
        timeout=LIMIT,
        env={**os.environ, **environment(), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = result.stdout
    assert result.returncode == 0, text[-3000:]
    assert "tokenizer: 2,048 ids in uint16" in text
    assert re.search(r"step 40: held-out loss \d\.\d+ nats per token over 4,096 tokens", text)
    assert "took over the lock" in text
    assert re.search(r"resumed after step [4-9]0: .*, as before", text)
    losses = [float(found) for found in re.findall(r"step \d+: held-out loss (\S+)", text)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 6.3 < 7 < metrics(tmp_path / "here" / "run")[0]["loss"]
    assert text.endswith("== done\n")
