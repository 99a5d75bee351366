"""Keeps the results of the tests on the CUDA machine: a row for each test file.

python outcome.py RESULT REPORT cold|warm SECONDS    (`run.py --outcome RESULT` does it)
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

from bench import results

COLUMNS = ("passed", "failed", "skipped")


def rows_of(report: Path, cache: str) -> list[dict]:
    """A row for each file of tests in a report of pytest.

    cache: "cold" if g++ had to compile all kernels in this run, or "warm".
    """
    counts: dict[str, Counter] = defaultdict(Counter)
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - our own file
        kinds = {child.tag for child in case}
        became = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        own = counts[case.get("file") or str(case.get("classname"))]
        own[became] += 1
        own["seconds"] += float(case.get("time") or 0)
    return [
        {"tests": file}
        | {name: own[name] for name in COLUMNS}
        | {f"seconds_{cache}": round(own["seconds"], 1)}
        for file, own in sorted(counts.items())
    ]


def keep(path: Path, report: Path, cache: str, seconds: float) -> None:
    """Write the outcome of a run. The times of a run with the other kind of cache stay."""
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "machine": {}}
    other = {"cold": "warm", "warm": "cold"}[cache]
    times = {row["tests"]: row.get(f"seconds_{other}") for row in before["rows"]}
    rows = [
        row | ({f"seconds_{other}": times[row["tests"]]} if times.get(row["tests"]) else {})
        for row in rows_of(report, cache)
    ]
    facts = {name: value for name, value in before["machine"].items() if name == f"seconds_{other}"}
    facts |= {f"seconds_{cache}": round(seconds)}
    facts |= {name: sum(row[name] for row in rows) for name in COLUMNS}
    results.write(str(path), "tests.cuda_machine", rows, **facts)
    print(f"{path}: {', '.join(f'{facts[name]} {name}' for name in COLUMNS)}, {seconds:.0f} s")


if __name__ == "__main__":
    result, report, cache, seconds = sys.argv[1:]
    keep(Path(result), Path(report), cache, float(seconds))
