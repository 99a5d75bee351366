"""The pictures of the pages: every kind draws what is true, and refuses what makes no sense."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import results
from docs.build import measured, pictures
from docs.build.blocks import Block, PageError
from docs.build.pictures.boxes import hops

LADDER = [
    {"product": name, "flop_per_byte": intensity, "gflops": speed, "percent_of_blas": speed}
    for name, intensity, speed in (("naive", 0.25, 0.5), ("tiled", 8, 5.0), ("BLAS", 64, 99))
]
SPANS = [
    {
        "what": what,
        "rank": rank,
        "kind": kind,
        "stage": rank,
        "mb": 0,
        "start_ms": start + rank,
        "end_ms": start + rank + 1.0,
    }
    for what in ("simulated", "measured", "wait: all_reduce x", "transfer: all_reduce x")
    for rank in (0, 1)
    for kind, start in (("F", 0), ("B", 3))
    if what[0] in "sm" or start
]


def drawn(words, root=Path()):
    """(the elements of a picture, its alt text)."""
    path, text, line = pictures.draw(Block("picture", f"one {words}", {}, Path("docs/a.md")), root)
    assert path == Path("docs/pictures/one.svg")
    alt = re.fullmatch(r"!\[(.*)\]\(pictures/one\.svg\)", line)[1]
    return list(ET.fromstring(text).iter()), alt  # noqa: S314 (our own picture)


@pytest.fixture
def files(tmp_path):
    results.write(
        str(tmp_path / "ladder.json"),
        "bench.tiles --products",
        LADDER,
        copy_gbs=20.0,
        blas_gflops=99.0,
    )
    measured.measure(tmp_path / "run.json", ["true"])
    found = json.loads((tmp_path / "run.json").read_text())
    found["trace"] = {"layout": "pp 2", "schedule": "naive", "rows": SPANS}
    (tmp_path / "trace.json").write_text(json.dumps(found))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("timeline naive --pp 4 --num-microbatches 1", "Each worker computes 25.0 % of the time"),
        ("tradeoff --pp 4 --num-microbatches 8", "1f1b: 27.3 % bubble, 4 stashed"),
        ("blocks column --ranks 2", "all-reduce of the input gradient at up"),
        ("blocks row --ranks 4", "Barrier in forward: all-reduce, 128.0 KiB"),
        ("blocks pair --ranks 2", "Barrier in forward: all-reduce, 128.0 KiB"),
        ("blocks gather --ranks 2", "Barrier in forward: all-gather, 512.0 KiB"),
        ("ring --ranks 3", "holds 111"),
        ("chain --layout tp=2", "with 4 barriers"),
        ("grid --layout dp=2,pp=2,tp=2", "dp: sums of gradients, 873.5 KiB"),
        ("memory --layout dp=1", "weights 3.2 MiB"),
        ("buckets --layout dp=2", "6 buckets"),
        ("bars dp=2 tp=2+sp --memory 0.01", "the device has 10.2 MiB"),
        ("tokens --cp 4 --seq-len 4096", "524,800 to 3,670,528 pairs"),
        (
            "rows --ep 4 --experts 8 --tokens 64",
            "zipf: 52 to 284 rows",
        ),  # 64 (.736 + .368), rounded, 4 times
        ("range", "float16: 2^-24 to 6.55e+04"),
        ("roofline ladder.json", "BLAS 99 GFLOP/s"),
        ("barrier trace.json", "all_reduce x"),
        ("predicted trace.json", "measured 5.0 ms below"),
    ],
)
def test_each_kind_draws(words, said, files):
    elements, alt = drawn(words, files)
    assert said in alt
    assert "[" not in alt
    assert "]" not in alt
    width = float(elements[0].get("width"))
    assert 300 <= width <= 4000
    assert all(
        float(one.get("x")) + float(one.get("width")) <= width
        for one in elements
        if one.tag.endswith("rect") and one.get("x")
    )


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_adds_everything(size):
    states = hops(size)
    assert len(states) == 2 * (size - 1) + 1
    assert states[0][0] == [[10**rank] * size for rank in range(size)]
    assert states[-1][0] == [[sum(10**rank for rank in range(size))] * size] * size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("timeline", "which schedule?"),
        ("timeline 1f1b --pp 0", "--pp 0"),
        ("blocks pair --ranks none", "none"),
        ("buckets --layout pp=2", "choose a layout with dp"),
        ("chain --layout pp=2", "choose a layout with tp"),
        ("barrier run.json", "use train --trace"),
        ("roofline run.json", "not of bench.tiles"),
        ("predicted", "name one result file"),
    ],
)
def test_a_wrong_picture_is_refused(words, message, files):
    with pytest.raises(PageError, match=re.escape(message)):
        drawn(words, files)
