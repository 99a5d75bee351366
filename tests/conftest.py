"""Fixtures and skips that apply to every test.

If this machine lacks something that a test needs, the test is skipped with the reason, never
passed.
"""

import functools
import gc
import hashlib
import importlib.util
import itertools
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import browser
import cuda_host
import hypothesis
import numpy as np
import program
import pytest
import slurm_cluster
import threadpoolctl

from bench.kernels import nvrtc
from mpipar.run.process.environment import CORETYPE, blas_pools

# Programs that the tests start multiply with the kernels that run here, so that the same products
# are equal in both.
for pool in blas_pools():
    if pool["internal_api"] == "openblas" and pool.get("architecture"):
        os.environ.setdefault(CORETYPE, pool["architecture"])

cuda_host.build_folder()  # so that all processes of the tests share it
EQUAL = Path(__file__).parent / "equal"
LONGEST = "tests/test_mpi_sessions.py::test_slow_session[4]"  # as long as all other sessions

# A busy machine makes slow examples: how long one takes is no finding.
hypothesis.settings.register_profile(
    "mpipar",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# The same examples in every CI run: a failure must come from the change, not from chance.
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("mpipar"), derandomize=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "mpipar")


@pytest.fixture(scope="session", autouse=True)
def one_blas_thread():
    """Threads of BLAS that wait would take the cores of the tests in the other processes."""
    with threadpoolctl.threadpool_limits(1, "blas"):
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend only on the test's name, so that a failing test repeats alone."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder to start in, with a text in it."""
    (tmp_path / "text.txt").write_text(program.LETTERS)
    return tmp_path


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts sees no outer launcher, and no numbers of threads."""
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_LOCAL")) or name.endswith(
            "_NUM_THREADS"
        ):
            monkeypatch.delenv(name)


@pytest.fixture(name="cupy", params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def real_cupy():
    """The module cupy, on a GPU or on the CUDA machine of tests/elsewhere/cuda_machine."""
    return importlib.import_module("cupy")


@functools.cache
def missing_gpu() -> str | None:
    """Return why the tests marked gpu cannot run here, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable CUDA device: {error}"
    return None if count else "no CUDA device"


@functools.cache
def missing_slurm() -> str | None:
    """Return why the tests marked slurm cannot run here, or None."""
    names = slurm_cluster.missing_programs()
    return f"not installed: {', '.join(names)}" if names else None


@functools.cache
def missing_browser() -> str | None:
    """Return why the tests marked browser cannot run here, or None."""
    names = browser.missing_programs()
    return f"not installed: {', '.join(names)}" if names else None


@functools.cache
def missing_package(name: str, title: str) -> str | None:
    """Return why the tests that import a package cannot run here, or None."""
    return None if importlib.util.find_spec(name) else f"{title} is not installed"


def missing_compiler() -> str | None:
    """Return why the tests marked shim cannot run here, or None."""
    return None if shutil.which("g++") else "g++ is not installed"


PACKAGES = {
    "peers": ("torch", "PyTorch"),
    "numba": ("numba", "Numba"),
    "cupy": ("cupy", "CuPy"),
    "text": ("tokenizers", "tokenizers"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "reframe": ("reframe", "ReFrame"),
    "sphinx": ("myst_parser", "Sphinx with MyST"),
}
NEEDS = {
    "gpu": missing_gpu,
    "slurm": missing_slurm,
    "browser": missing_browser,
    "shim": missing_compiler,
    "nvrtc": nvrtc.missing,
    **{marker: functools.partial(missing_package, *names) for marker, names in PACKAGES.items()},
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker names something that is not here."""
    for marker, missing in NEEDS.items():
        if item.get_closest_marker(marker) is not None and (reason := missing()) is not None:
            pytest.skip(f"{marker}: {reason}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/equal to the sessions that test_mpi_sessions.py starts under mpiexec."""
    if collection_path == EQUAL and not config.getoption("--with-mpi", False):
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what collection makes out of every search for garbage: it lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """With --dist loadfile, let the longest session run beside the others of its file."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid == LONGEST else super()._split_scope(nodeid)

    return Scheduling(config, log)


def beyond_pairs(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that can go: every two values that meet in a case of a test meet in another.

    The case with most pairs that no chosen case has is chosen next.
    """
    pairs_of = defaultdict(dict)
    for item in items:
        case = getattr(item, "callspec", None)
        values = [(name, repr(value)) for name, value in case.params.items()] if case else []
        pairs_of[item.path, item.originalname][item] = set(itertools.combinations(values, 2))
    left_out = set()
    for cases in pairs_of.values():
        missing = set().union(*cases.values())
        left_out |= cases.keys() if missing else set()
        while missing:
            best = max(cases, key=lambda item: len(cases[item] & missing))
            left_out.discard(best)
            missing -= cases[best]
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose cases by pairs where a test says so or emulates kernels; order what ends soonest.

    The sessions start first, of most ranks first, so that two processes (-n 2) end together.
    """
    left_out = beyond_pairs(
        item
        for item in items
        if item.get_closest_marker("shim") or item.get_closest_marker("pairs")
    )
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]

    def place(item: pytest.Item) -> tuple[bool, int]:
        of = getattr(item, "callspec", None)
        ranks = of.params.get("num_ranks", 0) if of else 0
        return item.path.name != "test_mpi_sessions.py", -ranks

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests that every session under mpiexec skipped: these did not run at all."""
    sessions = [
        {value for name, value in report.user_properties if name == "skipped_inside"}
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and "passed_inside" in dict(report.user_properties)
    ]
    for line in sorted(set.intersection(*sessions)) if sessions else []:
        terminalreporter.write_line(f"SKIPPED in each of {len(sessions)} MPI sessions: {line}")
