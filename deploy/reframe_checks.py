"""ReFrame checks of a cluster: that training runs and learns there, and the speed of its network.

    reframe -C SITE_CONFIG -c deploy/reframe_checks.py -r --performance-report
    reframe ... -S 'Train.num_tasks=64' -S 'Train.layout=dp=16,tp=4'

The environment of the site's configuration must contain mpipar (`pip install -e .` against its
MPI). Figures are compared with the site's `reference`, or only reported if it has none.
"""

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_before, sanity_function, variable


class Check(rfm.RunOnlyRegressionTest):
    """Settings of all checks: every system, and no folder of sources to copy."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    sourcesdir = None
    num_tasks = 2
    time_limit = "10m"


@rfm.simple_test
class Train(Check):
    """A short training run ends, and the model has learned something."""

    layout = variable(str, value="auto")
    executable = "mpipar"

    @run_before("run")
    def choose_layout(self):
        """Put the layout on the command line."""
        self.executable_opts = ["train", "--steps", "60", "--layout", self.layout]

    @sanity_function
    def it_learns(self):
        """Require a held-out loss below that of equally likely bytes, ln 256."""
        losses = sn.extractall(r"held-out loss (\S+) nats", self.stdout, 1, float)
        return sn.all([sn.assert_eq(sn.count(losses), 1), sn.assert_lt(losses[0], 5.545)])

    @performance_function("tok/s")
    def rate(self):
        """Return the tokens per second of the last printed step."""
        tokens = sn.extractall(r" (\S+)k tok/s", self.stdout, 1, float)
        return tokens[-1] * 1000


@rfm.simple_test
class Verify(Check):
    """One step on this layout gives the same result as one rank, tensor by tensor."""

    executable = "mpipar"
    executable_opts = ["verify", "--layout", "dp=2"]

    @sanity_function
    def all_agree(self):
        """Require all tensors in the summary line to agree."""
        line = r"(\d+) of (\d+) agree"
        agreeing, tensors = (sn.extractsingle(line, self.stdout, group) for group in (1, 2))
        return sn.assert_eq(agreeing, tensors)


@rfm.simple_test
class Interconnect(Check):
    """Messages and all-reduces of a few sizes, each payload checked before it is timed."""

    executable = "mpipar"
    executable_opts = [
        "net",
        "latency",
        "all-reduce",
        "--via",
        "comm",
        "-b",
        "8",
        "-e",
        "1M",
        "-f",
        "131072",
    ]

    @sanity_function
    def no_wrong_payload(self):
        """Require zero wrong payloads in all rows."""
        wrong = sn.extractall(r"^ +\d+ +\d+ +comm .* (\d+)$", self.stdout, 1, int)
        return sn.all([sn.assert_ge(sn.count(wrong), 4), sn.assert_eq(sn.sum(wrong), 0)])

    @performance_function("us")
    def sum_of_8_bytes(self):
        """Return the time of the smallest all-reduce."""
        return self.times()[2]

    @performance_function("us")
    def sum_of_1_mebibyte(self):
        """Return the time of the largest all-reduce."""
        return self.times()[3]

    def times(self):
        """Return the times of all rows: two of latency, then those of all-reduce."""
        return sn.extractall(r"^ +\d+ +\d+ +comm +(\S+)", self.stdout, 1, float)
