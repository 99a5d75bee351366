"""The flags of `mpipar net`, under the names that users of OSU's programs and nccl-tests know."""

from collections.abc import Iterator
from dataclasses import dataclass

from mpipar.config.run import ALL_REDUCES
from mpipar.config.setting import positional, setting, switch
from mpipar.config.text import shown
from mpipar.errors import UsageError, UserError, suggestion

CASES = (
    "latency", "bandwidth", "bidirectional", "all-reduce", "iall-reduce", "reduce-scatter",
    "all-gather", "broadcast", "all-to-all", "all-to-allv", "ring", "stage-chain",
)  # fmt: skip
VERBS = {"vet": "name slow hosts and links", "show": "show a result", "compare": "compare two"}
ROUTINGS = ("uniform", "hot", "one-hot", "zipf", "adversarial")
VIAS = ("comm", "mpi4py", "c", "algorithms")
BY = tuple(f"by {name}" for name in ALL_REDUCES if name != "mpi")
START = "mpiexec -n 2"
LARGEST = 1 << 40


@dataclass(frozen=True)
class Arguments:
    """What is measured, how often, and where the result goes."""

    words: tuple[str, ...] = positional(
        "CASE",
        f"{', '.join(CASES)} (all of them); or vet, show FILE, compare FILE FILE",
        default=(),
    )
    begin_bytes: int = setting(8, "smallest size", low=0, below=LARGEST, in_bytes=True, short="-b")
    end_bytes: int = setting(
        4 << 20, "largest size", low=0, below=LARGEST, in_bytes=True, short="-e"
    )
    factor: float = setting(2.0, "factor between sizes", low=1.01, high=1e9, short="-f")
    iterations: int = setting(
        0, "samples of each size and way; 0: by time and spread", low=0, high=100_000, short="-n"
    )
    warm_up: int = setting(5, "samples before the counted ones", low=1, high=100_000, short="-w")
    window: int = setting(64, "messages in flight", low=1, high=100_000, short="-W")
    dtype: str = setting(
        "float32",
        "of the numbers",
        choices=("float32", "float64", "bfloat16", "float16"),
        short="-d",
    )
    via: str = setting("comm,mpi4py", f"ways, of {','.join(VIAS)}", metavar="WAY,WAY")
    transport: str = setting(
        "mpi-host", "what carries arrays", choices=("mpi-host", "mpi-cuda", "staged", "nccl")
    )
    buffers: str = setting("rotated", "through memory, or one", choices=("rotated", "reused"))
    layout: str | None = setting(None, "run on this layout's groups", metavar="dp=2,tp=2")
    routing: str | None = setting(None, "parts of all-to-allv", choices=ROUTINGS)
    overlap: int = setting(8, "tests while computing, of iall-reduce", low=0, high=1000)
    machine: str | None = setting(None, "sheet of what is normal", metavar="FILE|NAME")
    quick: bool = switch("every case at three sizes, in less than a minute")
    launches: int | None = setting(
        None, "without mpiexec: so many jobs of --start, one after the other", low=1, high=1000
    )
    start: str = setting(START, "without mpiexec: what starts a job", metavar="COMMAND")
    json: str | None = setting(None, "write every sample", metavar="FILE")
    csv: str | None = setting(None, "write the rows as a table", metavar="FILE")
    html: str | None = setting(None, "write a page with pictures", metavar="FILE")
    sheet: str | None = setting(None, "write the links as a machine sheet", metavar="FILE")
    limit: float = setting(1.5, "vet: slow from so many times the normal", above=1.0, high=1e6)
    hang_stop: float = setting(
        600.0, "end the job after so many seconds without progress; 0: never", low=0.0, high=1e6
    )
    launch: int = setting(0, "number of this launch", low=0, rare=True)

    @property
    def verb(self) -> str:
        """The first word if it is no case, else ""."""
        return self.words[0] if self.words and self.words[0] in VERBS else ""


def problems(args: Arguments) -> Iterator[UserError]:
    """Yield what is wrong beyond the value of each flag."""
    files = len(args.words) - 1
    if args.verb:
        wanted = {"vet": (0,), "compare": (2,), "show": range(1, 1000)}[args.verb]
        if files not in wanted:
            yield UsageError(f"{args.verb}: type mpipar net {args.verb}{USAGE[args.verb]}")
    else:
        for word in args.words:
            if word not in CASES:
                yield UsageError(
                    f"{shown(word)}: no case{suggestion(word, (*CASES, *VERBS))}; choose from"
                    f" {', '.join(CASES)}"
                )
    if args.end_bytes < args.begin_bytes:
        yield UsageError(f"-b {args.begin_bytes} -e {args.end_bytes}: give -b at most -e")
    for word in args.via.split(","):
        if word not in VIAS:
            yield UsageError(f"--via {shown(word)}: give some of {','.join(VIAS)}")
    if args.layout and (pairs := [one for one in args.words if one in CASES[:3]]):
        yield UsageError(f"--layout has no groups for {', '.join(pairs)}; run it without --layout")
    if args.quick and (args.layout or args.sheet):
        yield UsageError("--quick goes with neither --layout nor --sheet; leave it out")


USAGE = {"vet": " [--limit 1.5] [--machine SHEET]", "show": " FILE", "compare": " BEFORE AFTER"}
