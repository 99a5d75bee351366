"""The output of bench.interconnect from samples: statistics, files, tables, findings; no MPI."""

import csv
import sys
import types

import fake_cupy
import numpy as np
import pytest
from bench_rows import BARE, COMM, row, write_file

from bench import table
from bench.interconnect import __main__ as interconnect
from bench.interconnect import (
    between,
    cuda_probe,
    findings,
    noise,
    places,
    records,
    session,
    statistics,
)
from bench.interconnect.cases import APART, BARE_PARTS, BARE_UNEVEN, BY, pattern
from bench.interconnect.messages import MOST_MESSAGES
from bench.interconnect.plans import Job
from bench.interconnect.sampling import TURNS, Plan, batch_size, enough
from bench.interconnect.session import Bounds
from mpipar import ops as ops_module
from mpipar.errors import DataError, EnvironmentProblem, OutputError


def test_interval_holds_the_median_as_often_as_it_says(rng):
    for draw in (rng.exponential, rng.lognormal):
        true = np.median(draw(size=200_000))
        hits = 0
        for _ in range(400):
            low, high = statistics.median_interval(draw(size=101))
            hits += low <= true <= high
        assert 0.93 <= hits / 400 <= 1.0
    assert statistics.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def one_mode(rng, count, spread=0.2):
    return 2.0 * np.exp(spread * rng.standard_normal(count))


ONE_MODE = {
    "equal": lambda rng: np.full(200, 3.0),
    "narrow": lambda rng: one_mode(rng, 400),
    "broad": lambda rng: one_mode(rng, 400, 1.0),
    "even": lambda rng: rng.uniform(1, 9, 400),
    "tail": lambda rng: 1 + rng.pareto(1.0, 400),
    "few outliers": lambda rng: np.concatenate([one_mode(rng, 400), np.full(20, 500.0)]),
    "close modes": lambda rng: np.concatenate([one_mode(rng, 200, 0.01) * f for f in (1, 1.2)]),
    "too few": lambda rng: np.array([1.0] * 5 + [9.0] * 4),
}


@pytest.mark.parametrize("kind", ONE_MODE)
def test_times_of_one_mode_have_none_named(rng, kind):
    for _ in range(20):
        assert statistics.two_modes(rng.permutation(ONE_MODE[kind](rng))) is None


@pytest.mark.parametrize("share", [0.12, 0.5, 0.88])
@pytest.mark.parametrize("factor", [2.5, 4.5, 100])
def test_two_modes_are_found_beside_outliers(rng, factor, share):
    slow = round(400 * share)
    fast_times, slow_times = one_mode(rng, 400 - slow, 0.1), factor * one_mode(rng, slow, 0.1)
    times = rng.permutation(np.concatenate([fast_times, slow_times, [5000.0] * 4]))
    fast_us, slow_us, found = statistics.two_modes(times)
    assert fast_us == pytest.approx(2.0, rel=0.05)
    assert slow_us == pytest.approx(2.0 * factor, rel=0.1)
    assert found == pytest.approx(share, abs=0.02)


def test_two_modes_are_columns_and_a_line_and_launches_share_them(capsys):
    apart = row(times=[2.0] * 30 + [9.0] * 20)
    assert [apart[name] for name in statistics.MODES] == pytest.approx([2.0, 9.0, 0.4])
    findings.say([row(size=8), apart])
    said = capsys.readouterr().out
    assert "1024 bytes, mpipar.comm: median 2 us, but 60% of the times are near 2 us" in said
    assert "8 bytes, mpipar.comm: median 10" not in said
    assert "slow_us" in table.as_text([apart])
    assert "slow_us" not in table.as_text([row()])
    launches = [row(median=value) | {"launch": number} for number, value in enumerate((2.0, 9.0))]
    (merged,) = between.combined(launches)
    assert [merged[name] for name in statistics.MODES] == pytest.approx([2.0, 9.0, 0.5])
    same = [apart | {"launch": 0}, *(row(median=2.0) | {"launch": one} for one in range(1, 9))]
    assert "fast_us" not in between.combined(same)[0]


def test_time_of_an_iteration_is_last_exit_minus_first_entry():
    entered, left = np.array([[0, 5], [0, 1]]), np.array([[10, 8], [3, 7]])
    assert statistics.iteration_ns(entered, left).tolist() == [10, 7]
    one = row("latency", per_sample=2) | {"entered_ns": [[0, 50]], "left_ns": [[4000, 9000]]}
    assert statistics.times_us(one).tolist() == [2.0]
    assert statistics.times_us(one | {"case": "ring"}).tolist() == [4.5]
    assert statistics.skew_us(one) == 0.0
    assert statistics.skew_us(one | {"case": "ring"}) == 0.05


def test_iterations_that_began_too_late_do_not_count():
    one = row(times=[1.0, 70.0, 3.0], late=1, late_at=[1])
    assert statistics.times_us(one).tolist() == [1.0, 3.0]
    apart = one | {"entered_ns": [[0, 0], [0, 90], [2, 0]]}
    assert statistics.skew_us(apart) == 0.001


def test_back_to_back_an_iteration_lasts_from_the_exit_before():
    """The first rank runs ahead of the second, and waits between the third and the fourth."""
    entered = np.array([[0, 2], [3, 9], [5, 15], [40, 41]])
    left = np.array([[3, 8], [5, 14], [6, 21], [44, 46]])
    assert statistics.back_to_back_ns(entered, left).tolist() == [8, 6, 7, 6]
    one = row("broadcast", sync="none") | {"entered_ns": entered, "left_ns": left}
    assert statistics.times_us(one).tolist() == [0.008, 0.006, 0.007, 0.006]
    assert statistics.skew_us(one) == 0.0


def test_straggler_among_the_ranks_is_named(rng):
    left = rng.normal(100.0, 5.0, (300, 8))
    left[rng.random(300) < 0.8, 5] += 40.0
    rank, share = statistics.last_share(left)
    assert rank == 5
    assert 0.75 < share < 0.9
    even = statistics.last_share(rng.normal(100.0, 5.0, (2000, 8)))[1]
    assert even < 0.2


def test_bandwidths_follow_the_conventions():
    assert statistics.bandwidths("all-reduce", 4, 1e6, 1000.0) == {
        "algbw_GBps": 1.0,
        "busbw_GBps": 1.5,
    }
    assert statistics.bandwidths("all-gather", 4, 1e6, 1000.0)["busbw_GBps"] == 0.75
    assert statistics.bandwidths("ring", 4, 1e6, 1000.0)["busbw_GBps"] == 1.0


def test_rank_sum_is_exact_for_few_and_right_for_many(rng):
    # both sides of the most extreme of C(8, 4) = 70 and C(10, 5) = 252 splits
    assert statistics.rank_sum([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert statistics.rank_sum([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert statistics.rank_sum([1, 1, 1], [1, 1, 1]) == 1.0
    false = [statistics.rank_sum(rng.normal(size=30), rng.normal(size=30)) for _ in range(400)]
    assert 0.02 <= np.mean(np.array(false) < 0.05) <= 0.09


def test_discoveries_follow_benjamini_and_hochberg():
    assert statistics.discoveries([0.01, 0.04, 0.03, 0.5]) == [True, False, False, False]
    assert statistics.discoveries([0.01, 0.02, 0.03, 0.5]) == [True, True, True, False]
    assert statistics.discoveries([]) == []


def test_file_gives_back_what_was_written(tmp_path):
    rows = [row(), row(size=2048)]
    path = write_file(tmp_path / "a.jsonl", rows, launches=2)
    runs = records.read(path)
    assert [run.status for run in runs] == ["complete"] * 2
    assert [run.rows for run in runs] == [rows, rows]
    assert [one["launch"] for one in records.rows_of([path])] == [0, 0, 1, 1]


def test_file_of_a_killed_run_is_read_up_to_there(tmp_path):
    path = tmp_path / "a.jsonl"
    write_file(path, [row(), row(size=2048)])
    text = path.read_text()
    path.write_text(text[: text.rindex('{"kind":"end"') - 40])
    (run,) = records.read(str(path))
    assert (len(run.rows), run.status) == (1, "cut off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("x\n", "not a line of JSON"),
        ('{"kind":"head","schema":99}\n', "schema 99"),
        ('{"kind":"row"}\n', "no head"),
        ('{"kind":"head","schema":2}\n{"kind":"z"}\n', "'z'"),
        ("[1]\n", "no object"),
        ('{"kind":"head","schema":2}\n{"kind":"row","x":1}\n', "lacks"),
        ("\x89PNG\n", "not text"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        records.read(str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match="No such file"):
        records.read(str(tmp_path / "none"))
    with pytest.raises(OutputError, match="--json"):
        records.Writer(str(tmp_path))


def test_row_whose_time_is_no_number_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write_file(path, [row(), row() | {"median_us": "3", "busbw_GBps": None}])
    with pytest.raises(DataError, match=r"a\.jsonl:3: busbw_GBps, median_us must be a number"):
        records.read(str(path))


def test_table_says_what_is_unchecked_and_skewed():
    text = table.as_text([row(checked="unchecked", skew_us=2.0), row(size=2048)])
    lines = text.splitlines()
    assert lines[0].startswith("# all-reduce: ranks 0,1 (same node)")
    assert "~" in lines[2]
    assert lines[2].endswith("unchecked")
    assert "~" not in lines[3]
    assert lines[3].endswith(" 0")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.02391, "0.02391"),
        (1.9, "1.900"),
        (12.345, "12.35"),
        (123456.7, "123457"),
        (1e-9, "0.000000"),
    ],
)
def test_four_digits_without_exponent(value, text):
    assert table.digits(value) == text


def test_csv_and_markdown_hold_the_rows():
    rows = [row(), row(via=BARE, median=5.0)]
    values = list(csv.DictReader(table.as_csv(rows).splitlines()))
    assert [value["median_us"] for value in values] == ["10.0", "5.0"]
    assert values[0]["ranks"] == "0+1"
    assert "left_ns" not in values[0]
    lines = table.as_markdown(rows).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_tails_are_those_of_osu():
    """Times of 1 to 100 us, and 201 us once: the mean is 51.99, the median 51."""
    lines = table.as_osu([row(times=[*range(1, 101), 201]), row(size=2048)]).splitlines()
    assert lines[0] == "# mpipar all-reduce, mpipar.comm"
    assert lines[1].split(maxsplit=2)[:2] == ["#", "Size"]
    assert [name in lines[1] for name in table.OSU_COLUMNS] == [True] * 4
    assert lines[2].split() == ["1024", "51.99", "51.00", "91.00", "100.00"]
    assert lines[3].split() == ["2048", *["10.00"] * 4]


def test_percent_of_the_bound_is_that_of_the_link():
    """10 us for 40,000 bytes are 4 GB/s. A stated rate belongs to the slowest kind of link."""
    inside, away = (row("ring", size=40_000, link=link) for link in ("same node", "between nodes"))
    one, two = (Bounds(5.0, 16.0, "mpi-host", several) for several in (False, True))
    assert one.columns(inside) == {
        "bound": "--bound-GBps",
        "bound_GBps": 5.0,
        "bound_percent": pytest.approx(80),
    }
    assert two.columns(away)["bound_percent"] == pytest.approx(80)
    assert two.columns(inside) == {
        "bound": "memory copy",
        "bound_GBps": 16.0,
        "bound_percent": pytest.approx(25),
    }
    unstated = two._replace(stated_GBps=None)
    assert unstated.columns(away) == {}
    assert unstated.describe() == "16 GB/s (memory copy) inside a host, unknown between hosts"
    assert two._replace(transport="staged").columns(inside) == {}
    both = row("bidirectional", size=40_000)
    assert one.columns(both)["bound_percent"] == pytest.approx(40)
    assert one.columns(row("barrier", size=0)) == {}


def test_percent_of_the_bound_stands_in_every_table():
    bounds = Bounds(None, 4.096, "mpi-host", False)
    one = row(size=10_240, median=10.0)
    rows = [one | bounds.columns(one), row("barrier", size=0)]
    head, names, line = table.as_text(rows[:1]).splitlines()
    assert ", bound 4.096 GB/s (memory copy)" in head
    assert (names.split()[-1], line.split()[-1]) == ("bound_percent", "25.00")
    first, second = csv.DictReader(table.as_csv(rows).splitlines())
    assert (first["bound_percent"], first["bound_GBps"], second["bound"]) == ("25.0", "4.096", "")
    cells = table.as_markdown(rows).splitlines()
    assert [line.split("|")[-2].strip() for line in cells] == ["bound_percent", "---", "25.00", ""]


SLOW = [row(median=30.0), row("reduce-scatter", median=8.0), row("all-gather", median=7.0)]
FINE = [row(median=14.0), *SLOW[1:]]


@pytest.mark.parametrize(
    ("rows", "broken"),
    [
        (SLOW, ("all-reduce", COMM, 2.0, "reduce-scatter + all-gather")),
        (FINE, None),
        (
            [
                row("reduce-scatter", BARE, median=20.0),
                row("reduce-scatter", BARE_UNEVEN, median=5.0),
            ],
            ("reduce-scatter", BARE, 4.0, f"reduce-scatter ({BARE_UNEVEN})"),
        ),
        *(
            (
                [row(median=30.0), row(via=via, median=10.0)],
                ("all-reduce", COMM, 3.0, f"all-reduce ({via})"),
            )
            for via in BY
        ),
        (
            [row("all-to-allv", BARE, median=30.0), row("all-to-allv", BARE_PARTS, median=10.0)],
            ("all-to-allv", BARE, 3.0, f"all-to-allv ({BARE_PARTS})"),
        ),
        (
            [row(median=30.0), row(size=2048)],
            ("all-reduce", COMM, 3.0, "the same with twice the size"),
        ),
        (
            [row(), row(size=2048, median=30.0)],
            ("all-reduce", COMM, 1.5, "twice with half the size"),
        ),
        *(
            (
                [
                    row(median=30.0),
                    row(via="by ring", median=10.0, size=size),
                ],  # rounded to the ranks
                near and ("all-reduce", COMM, 3.0, "all-reduce (by ring)"),
            )
            for size, near in ((1020, True), (1032, True), (960, False), (1100, False))
        ),
    ],
)
def test_broken_guidelines_are_found_with_their_factor(rows, broken):
    assert [(one.case, one.via, one.factor, one.instead) for one in findings.guidelines(rows)] == (
        [broken] if broken else []
    )


def test_guideline_that_the_intervals_leave_open_is_not_called_broken(rng):
    assert findings.guidelines([row(times=rng.uniform(5, 30, 15)), *SLOW[1:]]) == []


def test_guideline_must_be_broken_in_every_launch():
    both = [one | {"launch": 0} for one in SLOW]
    (one,) = findings.guidelines(both + [one | {"launch": 1} for one in SLOW])
    assert one.factor == 2.0
    assert findings.guidelines(both + [one | {"launch": 1} for one in FINE]) == []


def test_contention_is_the_worst_group_over_itself_alone():
    rows = [
        row(axis="dp", mode="alone", ranks=(0, 2)),
        row(axis="dp", mode="alone", ranks=(1, 3), median=20.0),
        row(axis="dp", mode="together", ranks=(0, 2), median=25.0),
        row(axis="dp", mode="together", ranks=(1, 3), median=22.0),
    ]
    (one,) = findings.contention(rows)
    assert one["contention"] == 2.5


def test_slow_pair_is_named():
    rows = [
        row("pairs latency", ranks=pair, median=median)
        for pair, median in (((0, 1), 2.0), ((0, 2), 9.0), ((1, 2), 2.1))
    ]
    assert findings.slow_pairs(rows) == [
        "ranks 0 and 2 (same node): 9.0 us, 4.3 times the median pair"
    ]
    assert findings.slow_pairs([rows[0], rows[1] | {"link": "between nodes"}]) == []
    assert "9.000" in table.matrix(rows, "median_us")


def test_time_that_was_taken_away_from_a_rank_is_counted(rng):
    """Two ranks with a quantum of 200 us; every tenth sample of rank 1 is 50 us longer."""
    took = np.full((1000, 2), 200_000)
    took[::10, 1] += 50_000
    one = row("noise", size=0, via="Python", sync="none") | {
        "entered_ns": np.zeros_like(took).tolist(),
        "left_ns": took.tolist(),
    }
    assert statistics.times_us(one).tolist() == (took[:, 1] / 1000).tolist()
    head, quiet, noisy = (line.split() for line in noise.noise_lines(one).splitlines())
    assert quiet[:4] == ["0", "200.0", "0.000", "0.0"]
    assert noisy[:4] == ["1", "200.0", "2.439", "50.0"]
    assert noisy[head.index("from_30_us")] == "488"  # 100 in 0.205 s


@pytest.mark.parametrize(("budget", "seconds"), [(0.05, 1.0), (0.5, 5.0), (20.0, 20.0)])
def test_detours_are_looked_for_all_the_time(budget, seconds):
    """A median that is known after 20 samples ends nothing: what is rare has not come yet."""
    plan = Plan(budget)
    own = noise.Noise.planned(None, plan)
    quiet = np.full(3000, 2e-4)
    assert enough(quiet[:20], 0.004, plan)
    assert not enough(quiet, 0.99 * seconds, own)
    assert enough(quiet, seconds, own)
    assert batch_size(quiet, own) == min(10_000, round(seconds / 2e-4 / TURNS))


def test_places_are_read_from_the_system(tmp_path):
    files = {
        "devices/system/node/node0/cpulist": "0-3,8\n",
        "devices/system/node/node1/cpulist": "4-7\n",
        "devices/system/cpu/cpu5/topology/physical_package_id": "1\n",
        "kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "kernel/mm/transparent_hugepage/defrag": "always defer [never]\n",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        "class/infiniband/mlx5_0/device/numa_node": "1\n",
        "class/net/eth0/operstate": "up\n",
        "class/net/eth0/speed": "-1\n",
        "class/net/eth0/device/numa_node": "-1\n",
        "class/net/lo/operstate": "unknown\n",
        "meminfo": "HugePages_Total:       7\nHugepagesize:       2048 kB\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert places.numa_nodes([1, 5], tmp_path) == [0, 1]
    assert (places.sockets([5], tmp_path), places.sockets([9], tmp_path)) == ([1], [-1])
    huge = places.huge_pages(tmp_path, tmp_path / "meminfo")
    assert huge == {"transparent": "madvise", "defrag": "never", "page_KiB": 2048, "set_aside": 7}
    own = {"cores": [0, 1, 2, 5], "numa": [0], "nics": places.nics(tmp_path), "huge_pages": huge}
    found = places.lines(
        [{"rank": rank, "host": host} | own for rank, host in enumerate(["a", "a", "b"])]
    )
    assert found == [
        "a: ranks 0-1 on cores 0-2,5, NUMA 0",
        "b: ranks 2 on cores 0-2,5, NUMA 0",
        (
            "a, b: mlx5_0 200 Gbit/s (NUMA 1), eth0; huge pages: transparent madvise (defrag"
            " never), 7 of 2 MiB set aside"
        ),
    ]
    assert places.nics(tmp_path / "none") == places.numa_nodes([0], tmp_path / "none") == []


def test_head_says_that_ranks_share_a_gpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    ops = ops_module.make("cuda", "float32")
    bench = types.SimpleNamespace(
        world=types.SimpleNamespace(size=2),
        places=[places.place_fact(rank, ops) for rank in (0, 1)],
    )
    head = dict.fromkeys(
        (
            "library",
            "transport",
            "clock",
            "start",
            "buffers",
            "bound",
            "cuda_aware_stated",
            "cuda_aware_tried",
        ),
        "-",
    )
    interconnect.say_head(
        bench,
        head
        | {
            "memory_copy_GBps": 9.0,
            "machine": {"load": 0.5},
            "footprint_bytes": 0,
            "crowded": False,
        },
    )
    assert "ranks 0, 1 share GPU 0000:3B:00.0" in capsys.readouterr().err


def test_ranks_agree_on_their_gpus_before_they_talk():
    """Otherwise the others would wait for a rank whose GPU is not usable."""

    def agree(function):
        raise EnvironmentProblem("somebody has none")

    with pytest.raises(EnvironmentProblem, match="somebody has none"):
        session.Bench(types.SimpleNamespace(agree=agree, world=None, host_rank=0), Job(), 0, Plan())


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("", "yes"),
        ("raise SystemExit(3)", "unknown"),
        ("raise SystemExit(1)", "no"),
        ("import os; os.kill(os.getpid(), 11)", "no"),
        ("import time; time.sleep(60)", "unknown"),
        ("import os; raise SystemExit('SLURM_X' in os.environ)", "yes"),
    ],
)
def test_probe_for_device_memory_has_three_answers(program, answer, monkeypatch):
    monkeypatch.setenv("SLURM_X", "1")
    limit = 1.0 if "sleep" in program else 60.0
    assert cuda_probe.probe([sys.executable, "-c", program], time_limit=limit) == answer


def test_probe_without_a_launcher_is_unknown():
    assert cuda_probe.probe([]) == cuda_probe.probe(["/none/mpiexec"]) == "unknown"


@pytest.mark.parametrize("changes", [
    {"size_bytes": "8"}, {"ranks": [[0, 1], 1]}, {"case": "a\x1b[2J"}, {"left_ns": [[1], [1, 2]]},
    {"median_us": float("nan")}, {"count": 10**30}, {"mode": "a\0"},
], ids=str)  # fmt: skip
def test_a_file_with_values_of_other_types_is_refused(changes, tmp_path):
    path = write_file(tmp_path / "a.jsonl", [row() | changes])
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        records.read(path)


# --- the benchmark's payloads: no two may look the same, so that a swap shows


def test_no_two_senders_parts_or_messages_are_alike():
    ranks, window = 300, 200
    parts = range(ranks * ranks)  # of an all-to-all
    messages = [
        source * MOST_MESSAGES + place for source in range(ranks) for place in range(window)
    ]
    for indices in (parts, messages):
        first = {float(pattern(index, 1, np.float32)[0]) for index in indices}
        assert len(first) == len(indices)
    values = pattern(7, 5000, np.float32)
    assert np.array_equal(values, (np.arange(5000) + 7 * APART) % ((1 << 24) - 1) + 1)
    assert len(set(values.tolist())) == 5000
    assert np.array_equal(values, pattern(7, 5000, np.float64))


def test_parts_that_are_summed_differ_and_their_sums_are_exact():
    ranks = 61
    sums = []
    for part in range(ranks):
        terms = [pattern(rank * ranks + part, 3, np.float32, ranks) for rank in range(ranks)]
        exact = sum(one.astype(np.int64) for one in terms)
        assert np.array_equal(sum(terms), exact)
        assert np.array_equal(sum(reversed(terms)), exact)
        sums.append(tuple(exact.tolist()))
    assert len(set(sums)) == ranks
    top = (1 << 24) // 4096 - 1
    assert 4096 * max(pattern(index, 1, np.int64, 4096)[0] for index in range(top)) < 1 << 24
