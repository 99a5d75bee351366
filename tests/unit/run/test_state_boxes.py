"""Boxes of any tensor on any layout: they tile it, and each layout saves the same state again."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import printed
from safetensors.numpy import load_file
from simulated_ranks import on_all
from state_cases import assert_filled, config_for, loaded, saved, savers_of

from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint.boxes import within
from mpipar.run.checkpoint.load import blocks
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.files.settings import values_of

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(LENGTHS, st.data())
def test_rows_of_copies_and_blocks_tile_a_shard(lengths, data):
    box = tuple(
        (first, first + length)
        for first, length in zip(
            data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths))),
            lengths,
            strict=True,
        )
    )
    copies = data.draw(st.integers(1, 9))
    shares = [boxes.share_of_rows(box, index, copies) for index in range(copies)]
    rows = [row for share in shares for row in range(*share[0])]
    assert rows == list(range(*box[0]))
    limit = data.draw(st.integers(1, 300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "BLOCK_BYTES", limit)
        blocks = list(boxes.row_blocks(box, 4))
    assert [row for block in blocks for row in range(*block[0])] == rows
    assert all(
        4 * boxes.volume(block) <= limit or block[0][1] - block[0][0] == 1 for block in blocks
    )


@given(LENGTHS, st.data())
def test_boxes_of_a_run_hold_its_elements_in_order(lengths, data):
    whole = np.arange(math.prod(lengths)).reshape(lengths)
    first, stop = sorted(data.draw(st.lists(st.integers(0, whole.size), min_size=2, max_size=2)))
    found = boxes.boxes_of_run(tuple(lengths), first, stop)
    parts = [whole[boxes.within(box, tuple((0, length) for length in lengths))] for box in found]
    numbers = [number for part in parts for number in part.reshape(-1)]
    assert numbers == list(range(first, stop))
    assert len(found) <= 2 * len(lengths) - 1
    assert all(part.size for part in parts)


@given(LENGTHS, st.data())
def test_tiling_is_judged_as_by_counting_every_element(lengths, data):
    """Boxes of cuts at random edges; then one edge is moved, or one box doubled or left out."""
    tiles = [()]
    for length in lengths:
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=2))})
        pairs = list(itertools.pairwise(cuts))
        tiles = [(*tile, pair) for tile in tiles for pair in pairs]
    assert boxes.tiling_problem(lengths, tiles) == ""
    number = data.draw(st.integers(0, len(tiles) - 1))
    assert "2 boxes cover" in boxes.tiling_problem(lengths, [*tiles, tiles[number]])
    assert "0 boxes cover" in boxes.tiling_problem(lengths, tiles[:number] + tiles[number + 1 :])
    axis = data.draw(st.integers(0, len(lengths) - 1))
    for moved in ((-1, 0), (0, 1), (1, 0), (0, -1)):
        pair = tuple(edge + by for edge, by in zip(tiles[number][axis], moved, strict=True))
        broken = [*tiles]
        broken[number] = (*tiles[number][:axis], pair, *tiles[number][axis + 1 :])
        assert boxes.tiling_problem(lengths, broken)


@st.composite
def layouts(draw, most=8):
    """(ranks, fields of a config) of a layout that the small decoder takes, uneven ones too."""
    dp, pp, tp = draw(
        st.sampled_from(
            [
                (dp, pp, tp)
                for dp in (1, 2, 3, 4, 5)
                for pp in (1, 2, 3)
                for tp in (1, 2, 3, 6)
                if dp * pp * tp <= most
            ]
        )
    )
    schedules = ["1f1b", "gpipe", "zb-h1"] + ["zb-v"] * (pp == 2) + ["interleaved"]
    schedule = draw(st.sampled_from(schedules)) if pp > 1 else "1f1b"
    order = draw(st.sampled_from(["pp,dp,cp,tp", "tp,cp,dp,pp", "dp,pp,tp,cp"]))
    zero = draw(st.sampled_from([0, 1, 3])) if dp > 1 else 0
    return dp * pp * tp, {
        "dp": dp,
        "pp": pp,
        "tp": tp,
        "schedule": schedule,
        "rank_order": order,
        "zero": zero,
        "bucket_bytes": 800,
    }


@given(
    layouts(),
    layouts(),
    st.fixed_dictionaries(
        {},
        optional={
            "tied": st.booleans(),
            "norm": st.just("rms"),
            "vocab_size": st.integers(2, 40),
            "ffn": st.integers(1, 30),
            "optimizer": st.just("sgd"),
            "dtype": st.sampled_from(["float64", "bfloat16", "float16"]),
        },
    ),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_there_and_back_changes_no_byte(tmp_path_factory, first, second, values):
    """Save on A, load and save on B, load and save on A again: the same bytes as the first time."""
    folder = tmp_path_factory.mktemp("there-and-back")
    (count_a, a), (count_b, b) = first, second
    original = saved(config_for(**{**values, **a}), count_a, folder / "a")

    def again(source, count, layout, name):
        workers = loaded(config_for(**{**values, **layout}), count, source)
        for worker in workers:
            assert_filled(worker)
        on_all(lambda saver: saver.save(3), savers_of(workers, folder / name))
        return committed_steps(folder / name)[-1][1]

    back = again(again(original, count_b, b, "b"), count_a, a, "back")
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in original.iterdir()
    }


# --- A checkpoint written by version 0.1.0 can still be read, onto any layout


OLD = Path(__file__).parent / "old_checkpoint"
STEP = OLD / "checkpoints" / "step-00000002"


def test_it_exports_the_weights_that_its_run_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 200)
    printed("ckpt", "export", OLD, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(OLD / "weights.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    "layout",
    [{"dp": 1}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}, {"dp": 2, "zero": 3}, {"dp": 1, "cp": 2}],
    ids=str,
)
def test_it_loads_onto_any_layout(layout):
    manifest = read_manifest(STEP)
    values = values_of(manifest.config) | {"pp": 1, "cp": 1, "tp": 1, "zero": 0} | layout
    size = values["dp"] * values["pp"] * values["cp"] * values["tp"]
    config, _ = resolve(build(values), size)
    whole = {
        kind: {name: array for name, _, array in blocks(STEP, manifest, manifest.tensors, kind)}
        for kind in manifest.kinds
    }
    seen = set()
    for worker in loaded(config, size, STEP):
        for flat in worker.flats:
            for kind in flat.state:
                for param, first, held in flat.parts_in(kind):
                    shard = np.zeros(param.local_shape, np.float32)
                    box = tuple((0, length) for length in param.shape)
                    inside = tuple(slice(0, stop - start) for start, stop in param.box)
                    shard[inside] = whole[kind][param.name][within(param.box, box)]
                    np.testing.assert_array_equal(
                        held, shard.reshape(-1)[first : first + held.size], err_msg=param.name
                    )
                    seen.add((kind, param.name))
    assert len(seen) == 3 * len(manifest.tensors)
