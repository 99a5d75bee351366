"""The common clock: planted offset and drift come back within the error bar that is printed."""

import re
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from helpers import REPOSITORY, find_launcher, run_command
from hypothesis import strategies as st
from program import LIMIT, TEXT, environment

from mpipar.run.trace import trace_file
from mpipar.run.trace.clock import CommonClock, Sample, best_sample
from mpipar.study.trace import waits

SECOND = 10**9


class Network:
    """Two clocks and a message between them: rank 0's time is the true one."""

    def __init__(self, offset_ns, drift, random):
        self.offset_ns, self.drift, self.random = offset_ns, drift, random
        self.now = 5 * SECOND

    def other(self, true_ns):
        """What the other clock shows at a true time."""
        return round(true_ns + self.offset_ns + self.drift * true_ns)

    def trip(self):
        """One ping-pong: each way takes its own time, at least 2 us."""
        sent = self.now
        at = sent + self.random.randint(2_000, 50_000)
        self.now = at + self.random.randint(2_000, 50_000)
        return sent, self.other(at), self.now


@hypothesis.given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    random=st.randoms(use_true_random=False),
)
def test_planted_offset_and_drift_are_found_within_the_error_bar(offset_ns, drift, random):
    network = Network(offset_ns, drift, random)
    trips = [network.trip() for _ in range(20)]
    before = best_sample(trips)
    assert before.error_ns == min(came - sent for sent, _, came in trips) / 2, "the shortest counts"
    first = network.now
    network.now += 30 * SECOND
    last = network.now
    after = best_sample([network.trip() for _ in range(20)])
    clock = CommonClock((0, 1), {1: before}, {1: after})
    error = clock.error_ns(1)
    assert error >= 2_000  # half of the shortest possible round trip
    for true_ns in (first, (first + last) // 2, last):
        found = clock.common_ns(1, network.other(true_ns))
        assert abs(found - true_ns) <= error + 2, "more off than the error bar says"
        assert clock.common_ns(0, true_ns) == true_ns
    assert clock.drift(1) == pytest.approx(drift, abs=2 * error / (30 * SECOND))
    times = np.array([network.other(first), network.other(last)])
    assert clock.common_ns(1, times).tolist() == [clock.common_ns(1, int(one)) for one in times]


def test_without_the_second_measurement_a_drift_is_seen_as_error():
    """The test above can fail: with the drift ignored, times are off by more than the bar."""
    clock = CommonClock((0, 1), {1: Sample(0, 0.0, 5_000)}, {})
    assert "drift unknown" in clock.describe()
    assert abs(clock.common_ns(1, 30 * SECOND + 30 * SECOND // 10**4) - 30 * SECOND) > 5_000


def test_one_host_keeps_its_clock():
    clock = CommonClock((0, 0, 0), {}, {})
    assert clock.describe() == "one host: its monotonic clock as it is"
    assert clock.common_ns(2, 12345) == 12345
    assert clock.largest_error_ns() == 0


def test_the_error_bar_between_two_ranks_adds_both():
    clock = CommonClock((0, 1, 2), {1: Sample(0, 0.0, 3.0), 2: Sample(0, 0.0, 4.0)}, {})
    assert clock.largest_error_ns() == 7.0


def can_make_time_namespaces():
    command = ["unshare", "-r", "--time", "--monotonic", "1000", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    find_launcher() is None or not can_make_time_namespaces(),
    reason="needs mpiexec and unshare --time (root or user namespaces)")  # fmt: skip


@needs_namespaces
def test_ranks_in_their_own_time_namespaces_share_one_time(tmp_path):
    """Rank 1's clock is 5000 s ahead: in the trace, no message arrives before it was sent."""
    train = [*(sys.executable, "-m", "mpipar", "train", "--layout", "pp=2", "--steps", "4"),
             *("--layers", "2", "--d-model", "16", "--heads", "2", "--seq-len", "8"),
             *("--batch-size", "8", "--trace", "2:4", "--sample-tokens", "0"),
             *TEXT, *("--out", str(tmp_path / "run"))]  # fmt: skip
    apart = ["unshare", "-r", "--time", "--monotonic", "5000"]
    command = [find_launcher(), "-n", "1", *train, ":", "-n", "1", *apart, *train]
    # MPICH copies big messages between processes directly, which user namespaces forbid.
    env = environment({"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    result = run_command(command, LIMIT, env, cwd=REPOSITORY)
    assert result.returncode == 0, result.tail()
    trace = trace_file.read(tmp_path / "run")
    assert trace.clock.owners == (0, 1)
    ahead = trace.clock.before[1].offset_ns - 5000 * SECOND
    error = trace.clock.largest_error_ns()
    assert abs(ahead) <= error, "the planted 5000 s came back"
    assert trace.clock.before[1].error_ns > 0
    assert re.fullmatch(
        r"2 clocks: offsets by ping-pong .* good to \+-[\d.]+ us", trace.clock.describe()
    )
    found = waits.find(trace)
    messages = [event for event in found.events if event.operation == "message"]
    assert len(messages) == 3 * 4 * 2  # steps x microbatches x directions
    for event in messages:
        send, receive = (call.record for call in event.calls)
        assert receive.done_ns >= send.posted_ns - error
