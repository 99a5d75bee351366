"""Read the JUnit files of all sections; print what was skipped and why, and the totals.

    python3 .ci/summary.py FOLDER [--must-run PREFIX ...]

A test that one section skipped and another one ran counts as run. Exits 1 when a test failed, when
none passed, or when a skip remains whose reason starts with one of the prefixes.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET


def outcome(case: ET.Element) -> tuple[str, str]:
    """Return ("passed" | "failed" | "skipped", reason) of one test case."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skip = case.find("skipped")
    if skip is None:
        return "passed", ""
    message = skip.get("message", "")
    if message == "collection skipped":  # a whole file: (path, line, 'Skipped: reason')
        message = (skip.text or "").rpartition("Skipped: ")[2].rstrip("\")' ")
    return "skipped", message


def properties(case: ET.Element, name: str) -> list[str]:
    """Return the values of a test's recorded properties with this name."""
    return [item.get("value") for item in case.iter("property") if item.get("name") == name]


def read(folder: Path):
    """Return the names of passed and failed tests, {name: reason} of skips, and MPI sessions.

    A session is (number of tests that passed in it, "test - reason" of those it skipped).
    """
    names: dict[str, list[str]] = {"passed": [], "failed": []}
    skips: dict[str, str] = {}
    sessions: list[tuple[int, set[str]]] = []
    for path in sorted(folder.glob("*.xml")):
        root = ET.parse(path)  # noqa: S314 (written by our own pytest)
        for case in root.iter("testcase"):
            name = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
            kind, reason = outcome(case)
            if kind == "skipped":
                skips[name] = reason
            else:
                names[kind].append(name)
            sessions += [
                (int(count), set(properties(case, "skipped_inside")))
                for count in properties(case, "passed_inside")
            ]
    return names["passed"], names["failed"], skips, sessions


def remaining(skips: dict[str, str], ran: set[str]) -> dict[str, list[str]]:
    """Return {reason: names} of the tests that no section ran; a skipped file by its file name."""
    by_reason = defaultdict(list)
    for name, reason in sorted(skips.items()):
        if name not in ran and not any(other.startswith(f"{name}.") for other in ran):
            by_reason[reason].append(name)
    return dict(by_reason)


def main() -> int:
    """Print the summary; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--must-run", nargs="*", default=[])
    options = parser.parse_args()
    passed, failed, skips, sessions = read(options.folder)
    left = remaining(skips, {*passed, *failed})
    inside = set.intersection(*(lines for _, lines in sessions)) if sessions else set()
    print(f"{sum(count for count, _ in sessions)} tests inside {len(sessions)} MPI sessions")
    print("skipped, and why:" if left or inside else "skipped: nothing")
    for reason, names in left.items():
        examples = ", ".join(names[:3]) + " ..." * (len(names) > 3)
        print(f"  {len(names)} test(s): {reason} [{examples}]")
    for line in sorted(inside):
        print(f"  in every MPI session: {line}")
    for name in failed:
        print(f"failed: {name}")
    unwanted = [reason for reason in left if reason.startswith(tuple(options.must_run))]
    for reason in unwanted:
        print(f"must not be skipped here: {reason}")
    num_skipped = sum(map(len, left.values()))
    print(f"total: {len(passed)} passed, {len(failed)} failed, {num_skipped} skipped")
    return 1 if failed or unwanted or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
