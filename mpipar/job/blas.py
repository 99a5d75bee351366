"""Which loops NumPy's BLAS runs: those of an architecture, chosen before NumPy is loaded.

OpenBLAS has loops for many processors, and takes those whose processor it finds. One that it does
not know gets old loops, at half the rate of those that its vector units could run. The variable
OPENBLAS_CORETYPE names other loops. OpenBLAS reads it once, when it is loaded. So child processes
try the loops (trial.py), and their rates are kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mpipar.files.cache import cache_folder
from mpipar.job.environment import THREAD_VARIABLES

VARIABLE = "OPENBLAS_CORETYPE"
AVX2 = ("avx2", "fma")
AVX512 = ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
# OpenBLAS's name of an architecture -> the vector units that its loops need, as Linux calls them.
ARCHITECTURES = {
    "Haswell": AVX2, "Zen": AVX2, "SkylakeX": (*AVX2, *AVX512),
    "Cooperlake": (*AVX2, *AVX512, "avx512_bf16"),
    "SapphireRapids": (*AVX2, *AVX512, "avx512_bf16"),
}
UNITS = tuple(dict.fromkeys(unit for units in ARCHITECTURES.values() for unit in units))
TRIED = ("SkylakeX", "Haswell")  # beside OpenBLAS's own choice: one for each width of vectors
GAIN = 1.1  # how much faster other loops must be: noise must not change OpenBLAS's own choice
TRIAL_SECONDS = 20.0  # on a machine on which all cores are busy
CPUINFO = Path("/proc/cpuinfo")
PROGRAM = Path(__file__).with_name("trial.py")


def processor() -> tuple[str, tuple[str, ...]]:
    """(name, vector units of UNITS) of this host's first processor; empty where nobody says."""
    text = ""
    with suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 14)
    name, flags = (re.search(rf"^{word}\s*: (.*)$", text, re.MULTILINE)
                   for word in ("model name", "flags"))
    has = set(flags[1].split()) if flags else ()
    return name[1] if name else "", tuple(unit for unit in UNITS if unit in has)


def lacking(architecture: str, units: Collection[str]) -> list[str]:
    """The vector units that an architecture's loops need, and that are not among these."""
    return [unit for unit in ARCHITECTURES.get(architecture, ()) if unit not in units]


def spelled(name: str) -> str:
    """A name of ARCHITECTURES as it stands there; OpenBLAS takes capital and small letters."""
    return next((one for one in ARCHITECTURES if one.lower() == name.lower()), name)


def wide(architecture: str | None) -> bool:
    """Whether an architecture's loops use AVX-512."""
    return "avx512f" in ARCHITECTURES.get(architecture, ())


def measured_rates() -> dict[str, float]:
    """{architecture: GFLOP/s of one thread} of this host, OpenBLAS's own choice first.

    Empty where NumPy has another BLAS, or nothing could be measured. Rates are measured once per
    processor and NumPy, and kept if every trial answered. Of two jobs that measure at the same
    time, the first one's rates are kept.
    """
    name, units = processor()
    numpy = importlib.util.find_spec("numpy").origin
    key = json.dumps([name, units, numpy, os.stat(numpy).st_mtime_ns])
    folder = cache_folder("blas")
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json" if folder else None
    if (kept := _kept(path)) is not None:
        return kept
    rates, whole = _measure(units)
    if path is not None and whole:
        own = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            own.write_text(json.dumps({"processor": name, "numpy": numpy, "gflops": rates}))
            with suppress(FileExistsError):
                os.link(own, path)
            own.unlink()
        return rates if (kept := _kept(path)) is None else kept
    return rates


def _kept(path: Path | None) -> dict[str, float] | None:
    """The rates in a file of the cache; None, and no file, where it is not one."""
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_text())["gflops"]
        return {str(name): float(rate) for name, rate in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        with suppress(OSError):
            path.unlink()
        return None


def _measure(units: Collection[str]) -> tuple[dict[str, float], bool]:
    """OpenBLAS's own choice, and each of TRIED whose vectors have another width.

    And whether every trial answered. One that was interrupted or took too long must come again.
    """
    first = _trial()
    if first is None or first["library"] != "openblas" or not first["architecture"]:
        return {}, first is not None
    own = first["architecture"]
    rates, whole = {own: first["gflops"]}, True
    for name in TRIED:
        same = own in ARCHITECTURES and wide(name) == wide(own)
        if same or lacking(name, units):
            continue
        other = _trial(name)
        whole = whole and other is not None
        if other is not None and other["architecture"] == name:
            rates[name] = other["gflops"]
    return rates, whole


def _trial(architecture: str | None = None) -> dict | None:
    """What trial.py prints with an architecture's loops; None if it fails."""
    environ = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    if architecture:
        environ[VARIABLE] = architecture
    try:
        done = subprocess.run([sys.executable, "-P", str(PROGRAM)], env=environ, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, check=True,
                              timeout=TRIAL_SECONDS)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def fastest(rates: Mapping[str, float], units: Collection[str]) -> str | None:
    """The architecture whose loops are fastest, of those that these vector units can run.

    OpenBLAS's own choice stays unless another is faster by GAIN. None: nothing is known.
    """
    possible = {name: rate for name, rate in rates.items()
                if name in ARCHITECTURES and not lacking(name, units)}
    if not possible:
        return None
    own, best = next(iter(possible)), max(possible, key=possible.get)
    return best if possible[best] > GAIN * possible[own] else own


def untried(architecture: str | None, units: Collection[str]) -> str | None:
    """An architecture whose vectors are wider than those of the loops that run here, or None."""
    if wide(architecture):
        return None
    wider = TRIED[:1] if architecture in ARCHITECTURES else TRIED
    return next((name for name in wider if not lacking(name, units)), None)


def rates_text(rates: Mapping[str, float]) -> str:
    """The rates of a trial, in words."""
    return ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items())


def pools() -> Sequence[dict]:
    """The BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def shown(pool: Mapping) -> str:
    """A library with its version, and the architecture of its loops, where it says."""
    version = ".".join(str(pool["version"]).split(".")[:3])
    loops = pool.get("architecture")
    return f"{pool['internal_api']} {version}" + (f", loops for {loops}" if loops else "")


def slowdown(threads: int) -> float:
    """How many times as long products take with so many threads as with one, at this moment."""
    from mpipar.job import trial

    return trial.slowdown(threads)


def one_thread() -> None:
    """Let BLAS use one thread from now on."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, "blas")
