"""What the rows of a benchmark say together, of one launch or of several."""

from __future__ import annotations

from bench import results, table
from bench.interconnect import findings
from bench.interconnect.between import combined
from bench.interconnect.noise import Noise, noise_lines


def say(rows) -> None:
    """Print pair matrices, noise, contention and broken guidelines.

    Times of several launches are their medians. Noise is that of each launch.
    """
    several = len({row.get("launch") for row in rows}) > 1
    merged = combined(rows) if several else rows
    for value, case in (("median_us", "pairs latency"), ("algbw_GBps", "pairs bandwidth")):
        for via in dict.fromkeys(row["via"] for row in merged):
            pairs = [row for row in merged if row["case"] == case and row["via"] == via]
            if pairs:
                print(f"\n# {case}, {via}, {value} of {pairs[0]['size_bytes']} bytes\n"
                      + table.matrix(pairs, value))
                print("\n".join(f"slow: {line}" for line in findings.slow_pairs(pairs)), end="")
    for row in rows:
        if row["case"] == Noise.name:
            launch = f", launch {row['launch']}" if several else ""
            print(f"\n# noise{launch}: detours of a fixed piece of work, a second of it\n"
                  + noise_lines(row))
    if shared := findings.contention(merged):
        print(f"\n# contention: together over alone\n{results.text_table(shared, left=3)}")
    if broken := findings.guidelines(rows):
        where = "every launch" if several else "this launch"
        print(f"\n# slower than what could replace it, in {where}\n"
              + results.text_table([one._asdict() for one in broken], left=2))
