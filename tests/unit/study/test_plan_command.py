"""`mpipar plan`, `explain` on a machine, and --layout auto: what is answered, chosen, refused."""

import json
import re
import shlex
from dataclasses import replace

import pytest
from in_process import assert_refused, printed, refusal

from mpipar.config.resolve import resolve
from mpipar.config.sections import Config, build
from mpipar.errors import UsageError
from mpipar.run.files.settings import ParsedConfig, over
from mpipar.run.resume import resumed
from mpipar.study.explain.predict import fullest, predict
from mpipar.study.plan.machine import SHEETS, load_machine
from mpipar.study.plan.of_config import best_of, legal_layouts, step_of, with_best_layout

H200 = (SHEETS / "h200.toml").read_text()
MORE_LINKS = "[[links]]\njoins = 64\ngbytes_s = 9.0\nlatency_us = 9.0\n\n[[links]]\njoins = 0"
WORDS = ("plan", "llama-8b", "--machine", "h100", "--ranks", "16", "--batch-size", "32")


def test_a_plan_is_a_command_line_with_reasons():
    text = printed(*WORDS)
    assert max(map(len, text.splitlines())) <= 100
    first, second, third = text.splitlines()[:3]
    assert first.startswith("dp ")
    assert "(best measured on h100: 55.5 %" in second
    assert "76.0 GiB on the fullest rank (mpipar's own step, on shapes); bound by " in third
    for words in (
        "mpiexec -n 16 mpipar train --preset llama-8b --layout dp=",
        "why not first",
        "a network between nodes half as fast",
        "layouts weighed; not taken",
        "half of the stack's published steps are within 3 % of the model",
        "published runs that are most like it",
    ):
        assert words in text


def test_json_has_what_the_text_says():
    found = json.loads(printed(*WORDS, "--json"))
    assert len(found["layouts"]) == 6
    for one in found["layouts"]:
        assert one["step_s"] == pytest.approx(sum(one["parts_s"].values()))
        axes = [one["layout"][axis] for axis in ("dp", "pp", "cp", "tp")]
        assert axes[0] * axes[1] * axes[2] * axes[3] == 16
        assert sum(one["stage_layers"]) == 32
        assert 100 * one["mfu"] <= 57.5 + 1e-6
    first = found["layouts"][0]["layout"]
    typed = ",".join(f"{axis}={first[axis]}" for axis in ("dp", "pp", "cp", "tp"))
    again = json.loads(printed(*WORDS, "--layout", typed, "--json"))
    assert [one["layout"] for one in again["layouts"]] == [first]


def test_the_command_can_be_typed():
    """`explain` resolves the same flags as `train`, without a GPU."""
    command = json.loads(printed(*WORDS, "--json"))["command"].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:5] == ["mpiexec", "-n", "16", "mpipar", "train"]
    assert "memory at the peak: " in printed("explain", *words[5:])


def test_a_step_on_a_machine_is_the_sum_of_its_parts():
    text = printed("explain", "--layout", "dp=2,pp=2", "--machine", "cpu")
    line = text[text.index("predicted step on cpu: ") :]
    total, *parts = map(float, re.findall(r"([\d.]+)\s+(?:ms|[a-z])", line))
    assert total == pytest.approx(sum(parts), abs=0.05)
    assert "idle in the pipeline" in " ".join(line.split())


def test_islands_stand_beside_data_parallelism_across_a_slow_link(tmp_path):
    """A site of two ranks sends what two predicted ranks do."""
    sheet, levels = tmp_path / "sites.toml", ((1, 100.0, 5.0), (2, 10.0, 20.0), (0, 0.1, 10_000.0))
    names = ("joins", "gbytes_s", "latency_us")
    links = [dict(zip(names, one, strict=True)) for one in levels]
    text = "".join(f"\n[[links]]\n{to_text(one)}" for one in links)
    sheet.write_text(H200.partition("[[links]]")[0] + text)
    words = ("plan", "gpt2", "--machine", sheet, "--ranks", "4", "--layout", "dp=4", "--zero", "0")
    assert "--islands 2 --outer-interval 50" in printed(*words)
    whole, *ways = json.loads(printed(*words, "--json"))["across_sites"]
    seconds = [one["step_s"] for one in ways]
    meeting = (seconds[0] - seconds[2]) / (1 - 1 / 50)
    assert seconds[1] == pytest.approx(seconds[0] - 0.9 * meeting)
    assert seconds[2] < whole["step_s"] < seconds[0]
    values = {"preset": "gpt2", "dp": 4, "pp": 1, "tp": 1, "islands": 2, "outer_interval": 1}
    found = predict(resolve(build(values), 4)[0], 0)
    sent = sum(one.wire_bytes for one in found.recorder.records if one.name == "outer.delta")
    plain = predict(resolve(build({"preset": "gpt2", "dp": 4, "pp": 1, "tp": 1}), 4)[0], 0)
    summed = sum(one.wire_bytes for one in plain.recorder.records if one.axis == "dp")
    assert whole["site_bytes"] == pytest.approx(summed, rel=0.01)  # float32 beside 16-bit products
    assert [one["site_bytes"] for one in ways] == pytest.approx(
        [2 * sent, 2 * sent / 10, 2 * sent / 50], rel=0.01
    )


def to_text(values):
    """TOML of a table of numbers."""
    return "".join(f"{name} = {value}\n" for name, value in values.items())


def test_nothing_fits():
    text = printed("plan", "llama-70b", "--machine", "h100", "--ranks", "8", code=1)
    assert text.startswith("no layout fits: ")
    assert re.search(r"on \d+ devices one does", text)
    text = printed("plan", "gpt2", "--machine", "h100", "--ranks", "1", "--zero", "1", code=1)
    assert "leave none that can be run" in text


@pytest.mark.slow
def test_a_machine_of_ones_own(tmp_path):
    (tmp_path / "mine.toml").write_text(H200.replace("[[links]]\njoins = 0", MORE_LINKS))
    text = printed("plan", "llama-8b", "--machine", tmp_path / "mine.toml", "--ranks", "128")
    assert "on 128 x mine" in text


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("mine.json", "{}", "does not end in .toml"),
        ("bad.toml", 'basis = "none"\n', "has no"),
        *(
            ("mine.toml", H200.replace(old, new), problem)
            for old, new, problem in (
                ("hbm_gbytes_s = 4800.0", "hbm_gbytes_s = -1", "hbm_gbytes_s is -1"),
                ("memory_gib = 140.0", "memory_gib = 1e300", "memory_gib is 1e+300"),
                ("joins = 8\n", "joins = 0\n", "links join 0, 0 devices"),
                ("joins = 0\n", "joins = 12\n", "links join 8, 12 devices"),
                ("joins = 0\n", "joins = 16\n", "links join 16 devices, the job has 32"),
                ("[[links]]\njoins = 8\n", "[[links]]\njoins = 0\n", "links join 0, 0 devices"),
                ('efficiency = "h100"', 'efficiency = "h100"\ndevice = "tpu"', "use cuda or cpu"),
                ('efficiency = "h100"', 'efficiency = "x"', "efficiency x: no software"),
                ("float16 = ", "float15 = ", "neither bfloat16 nor float16"),
            )
        ),
    ],
)
def test_a_machine_that_cannot_be(name, text, problem, tmp_path):
    assert text != H200
    (tmp_path / name).write_text(text)
    assert problem in str(
        refusal("plan", "llama-8b", "--machine", tmp_path / name, "--ranks", "32")
    )


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("plan", "nosuch", "--machine", "h100", "--ranks", "8"), ["is not a preset"]),
        (("plan", "llama-8", "--machine", "h100", "--ranks", "8"), ["did you mean llama-8b?"]),
        (("plan", "llama-8b", "--machine", "h10", "--ranks", "8"), ["did you mean h100?"]),
        (("plan", "llama-8b", "--machine", "none.toml", "--ranks", "8"), ["none.toml"]),
        (("plan", "none.toml", "--machine", "h100", "--ranks", "8"), ["none.toml"]),
        (("plan", "tiny", "--machine", "h100", "--ranks", "0"), ["--ranks 0"]),
        ((*WORDS, "--layout", "dp=0", "--memory-limit", "x"), ["--memory-limit x"]),
        ((*WORDS, "--layout", "dp=0"), ["--layout dp=0"]),
        ((*WORDS, "--layout", "tp=3"), ["is not a multiple of 3"]),
        ((*WORDS, "--layout", "ep=2"), ["MODEL llama-8b has no experts"]),
        ((*WORDS, "--layout", "pp=1", "--schedule", "zb-v"), ["pp is 1"]),
        ((*WORDS[:6], "--batch-size", "63", "--layout", "dp=8"), ["use 56 or 64"]),
        (
            ("plan", "mixtral-8x7b", "--machine", "h100", "--ranks", "12", "--layout", "ep=3"),
            ["does not divide the 8 experts"],
        ),
        ((*WORDS, "--html", "x"), ["--html"]),
        ((*WORDS, "--stack", "fsdp", "--layout", "tp=2"), ["fsdp cuts a job along dp only"]),
        ((*WORDS, "--stack", "fsdp", "--zero", "1"), ["--stack fsdp has 0 and 3 only"]),
        ((*WORDS, "--stack", "megatron", "--optimizer", "muon"), ["is counted with AdamW"]),
    ],
)
def test_refusals_name_everything(words, problems):
    text = " ".join(refusal(*words).problems)
    for problem in problems:
        assert problem in text


def test_sequences_that_weights_do_not_take_are_refused(tmp_path):
    model = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 256,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    words = ("plan", tmp_path, "--machine", "h100", "--ranks", "2", "--seq-len")
    assert "sequences of at most 64 tokens" in str(refusal(*words, "128"))
    assert "--seq-len 32" in printed(*words, "32")


# --- --layout auto: which layouts there are, which one is chosen, and what stays unchanged


LAYOUTS = [{"dp": 4}, {"pp": 4}, {"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}]


def axes_of(readings):
    return {(one.config.grid.dp, one.config.grid.pp, one.config.grid.tp) for one, _ in readings}


def configs(limit=None, num_microbatches=4):
    """The same 16 rows on four ranks, in several layouts."""
    found = []
    for axes in LAYOUTS:
        sizes = {"dp": 1, "pp": 1, "tp": 1} | axes
        values = sizes | {"batch_size": 16, "num_microbatches": num_microbatches}
        found.append(resolve(build(values | {"memory_limit": limit}), 4)[0])
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_choice_has_the_shortest_step_of_its_data_sheet(dtype):
    every = [replace(one, run=replace(one.run, dtype=dtype)) for one in configs()]
    steps = [step_of(one, load_machine("cpu")).total for one in every]
    place, note = best_of(every, None)
    assert steps[place] == min(steps)
    assert note.startswith("--layout auto: predicted steps by the data sheet cpu: dp ")
    assert note.count(" ms") == len(every)


def test_another_machine_may_choose_another_layout():
    assert "by the data sheet h100" in best_of(configs(), "h100")[1]
    with pytest.raises(UsageError, match="did you mean h100"):
        best_of(configs(), "h10")


def test_what_does_not_fit_a_limit_is_not_chosen():
    peaks = [fullest(one).peak_total for one in configs()]
    place, note = best_of(configs(min(peaks)), None)
    assert peaks[place] == min(peaks)
    assert note.count(" ms") == peaks.count(min(peaks))
    with pytest.raises(UsageError) as caught:
        best_of(configs(1000), None)
    assert len(caught.value.problems) == len(peaks)
    assert "and --memory-limit is 1000 B" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        ({}, 4, {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)}),
        ({"tp": 2}, 4, {(2, 1, 2), (1, 2, 2)}),
        ({}, 3, {(1, 3, 1)}),  # three copies would need 24 rows, three tp ranks another model
        ({"cp": 2}, 2, {(1, 1, 1)}),
        ({"zero": 1}, 2, {(2, 1, 1)}),
        ({"batch_size": 18, "num_microbatches": 2}, 3, {(3, 1, 1), (1, 3, 1)}),
    ],
)
def test_layouts_are_those_that_these_ranks_can_have(values, ranks, expected):
    reading = ParsedConfig(build(values), given=values, chooses_layout=True)
    assert axes_of(legal_layouts(reading, ranks)) == expected
    alone = replace(reading, chooses_layout=False)
    assert with_best_layout(alone, ranks) is alone


def test_a_run_that_goes_on_keeps_what_was_chosen():
    saved = {"dp": 2, "pp": 1, "cp": 1, "tp": 1, "schedule": "zb-h1", "stage_layers": None}
    reading = ParsedConfig(Config(), chooses_layout=True)
    kept = resumed(reading, saved, 2)
    assert not kept.chooses_layout
    assert kept.config.grid.dp == 2
    assert resumed(reading, saved, 4).chooses_layout
    assert resumed(over({}, replace(reading, given={"tp": 2})), saved, 2).chooses_layout


def test_only_train_chooses(tmp_path):
    for words in (("explain",), ("verify",)):
        assert "--layout auto: only mpipar train accepts it" in str(
            refusal(*words, "--layout", "auto")
        )
    (tmp_path / "job.toml").write_text('layout = "auto"\nlayers = 2\n')
    text = printed("train", "--config", tmp_path / "job.toml", "--print-config")
    assert "# --layout auto: training chooses" in text
    text = printed("train", "--config", tmp_path / "job.toml", "--layout", "dp=1", "--print-config")
    assert "chooses" not in text
    (tmp_path / "axes.toml").write_text('layout = "pp=2"\nlayers = 2\n')
    text = printed(
        "train", "--config", tmp_path / "axes.toml", "--layout", "auto", "--print-config", ranks=1
    )
    assert "pp = 1" in text


def test_a_cost_model_without_a_choice_is_refused():
    assert_refused(
        2,
        ["--machine machine.json: it is for --layout auto"],
        "train",
        "--machine",
        "machine.json",
        ranks=2,
    )
