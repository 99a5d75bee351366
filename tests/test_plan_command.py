"""`mpipar plan`: what it prints and refuses."""

import csv
import io
import json
import re

import pytest
from in_process import at_once, printed, refusal

from mpipar.plan.cluster import MACHINES

H200 = (MACHINES / "h200.toml").read_text()
MORE_LINKS = """[[links]]
joins = 64
gbytes_s = 9.0
latency_us = 9.0

[[links]]
joins = 0"""
WORDS = (
    "plan",
    "llama-8b",
    "--machine",
    "h100",
    "--ranks",
    "16",
    "--batch-size",
    "32",
    "--cp",
    "1",
)


def test_a_plan_is_a_command_line_with_reasons():
    text = printed(*WORDS)
    assert "it fits: " in text
    assert "mpiexec -n 16 mpipar train --preset llama-8b --layout dp=" in text
    for words in (
        "gradient sums",
        "pipeline rank",
        "against the first",
        "rejected:",
        "if this were",
        "published runs that are most like it",
        "MFU ",
    ):
        assert words in text
    assert all(len(line) < 240 for line in text.splitlines())


def test_json_and_csv_say_the_same():
    found = json.loads(printed(*WORDS, "--json"))
    rows = list(csv.DictReader(io.StringIO(printed(*WORDS, "--csv"))))
    assert len(rows) == len(found["layouts"]) == 5
    first = found["layouts"][0]
    assert float(rows[0]["step_s"]) == pytest.approx(first["step_s"], rel=1e-5)
    assert first["step_s"] == pytest.approx(sum(first["parts_s"].values()))
    product = 1
    for axis in ("dp", "pp", "cp", "tp"):
        product *= int(rows[0][axis])
    assert product == 16
    axes = [first["layout"][axis] for axis in ("dp", "pp", "tp")]
    typed = ",".join(f"{axis}={size}" for axis, size in zip(("dp", "pp", "tp"), axes, strict=True))
    again = json.loads(printed(*WORDS, "--layout", typed, "--json"))
    assert [one["layout"] for one in again["layouts"]] == [first["layout"]]


def test_the_answer_says_what_goes_from_node_to_node():
    text = printed(*WORDS, "--pp", "2", "--tp", "1", "--top", "1")
    assert (
        "nodes have 8 devices: messages of pp go from node to node, those of dp stay inside"
        "; with --rank-order dp,pp,cp,tp a step takes "
    ) in text
    assert "nodes have" not in printed(
        *WORDS[:5], "8", "--batch-size", "32", "--tp", "4", "--top", "1"
    )


def test_each_pipeline_rank_has_its_memory_and_seconds():
    """The last rank also has the head, so it has fewer blocks, or the others wait for it."""
    given = ("--pp", "4", "--schedule", "1f1b", "--tp", "2", "--recompute", "block", "--top", "1")
    found = json.loads(printed(*WORDS, *given, "--json"))
    first, ranks = found["layouts"][0], found["pipeline_ranks"]
    blocks = [rank["blocks"] for rank in ranks]
    assert blocks == first["stage_layers"]
    assert sum(blocks) == 32
    assert blocks[-1] == min(blocks) < 8
    for rank in ranks:
        assert sum(rank["parts_s"].values()) == pytest.approx(first["step_s"])
        assert min(rank["parts_s"].values()) >= 0
    assert max(sum(rank["memory_bytes"].values()) for rank in ranks) == pytest.approx(
        sum(first["memory_bytes"].values())
    )
    two, last = (rank["parts_s"]["products"] for rank in ranks[2:])
    assert last > two * blocks[3] / blocks[2]  # of its blocks, and of the head
    less, more = next(
        row["steps_s"] for row in found["changes"] if row["input"] == "idle in the pipeline"
    )
    assert more - less == pytest.approx(0.4 * first["parts_s"]["bubble"])
    assert less < first["step_s"] < more
    text = printed(*WORDS, *given)
    names = "products attention elementwise recompute tp idle pp dp update"
    line = next(line for line in text.splitlines() if line.startswith("seconds of rank"))
    assert line.split()[3:] == names.split()


def test_what_would_change_the_answer():
    words = ("plan", "llama-8b", "--machine", "a100-40", "--ranks", "16", "--batch-size", "32")
    found = json.loads(printed(*words, "--cp", "1", "--json"))
    changed = {row["input"]: row for row in found["changes"]}
    first, step = found["layouts"][0]["layout"], found["layouts"][0]["step_s"]
    less, more = changed["rate of products"]["steps_s"]
    assert more < step < less
    assert found["command"].startswith("mpiexec -n 16 mpipar train --preset llama-8b")
    # With less memory another layout must do, which asking for less memory finds too.
    less, more = changed["memory of a device"]["first"]
    smaller = json.loads(printed(*words, "--cp", "1", "--json", "--headroom", "24"))
    assert less == smaller["layouts"][0]["layout"] != first
    assert changed["memory of a device"]["steps_s"][1] <= step * 1.03


def test_the_answers_are_in_the_order_of_their_steps():
    found = json.loads(
        printed(
            "plan",
            "gpt3-175b",
            "--machine",
            "a100-80",
            "--ranks",
            "64",
            "--batch-size",
            "64",
            "--tp",
            "8",
            "--rows",
            "1",
            "--json",
        )
    )
    steps = [one["step_s"] for one in found["layouts"]]
    assert steps == sorted(steps)


def test_given_parts_of_the_layout_stay():
    given = (
        "--tp",
        "4",
        "--recompute",
        "block",
        "--zero",
        "1",
        "--num-microbatches",
        "4",
        "--no-sequence-parallel",
    )
    layouts = [one["layout"] for one in json.loads(printed(*WORDS, *given, "--json"))["layouts"]]
    names = ("tp", "recompute", "zero", "num_microbatches", "sequence_parallel")
    assert {tuple(one[name] for name in names) for one in layouts} == {(4, "block", 1, 4, False)}
    assert "the given microbatches do not make up a replica's share of the batch" in printed(
        *WORDS, "--rows", "3", code=1
    )


def test_a_function_that_mpipar_does_not_train_is_planned_and_said():
    words = (*WORDS, "--dp", "16", "--zero", "3", "--rows", "1", "--top", "1")
    gated, squared = (
        json.loads(printed(*words, "--json", *more)) for more in ((), ("--activation", "relu2"))
    )
    products = 32 * 4096 * 14336  # of the gates of all blocks
    assert gated["model"]["parameters"] - squared["model"]["parameters"] == products
    assert squared["layouts"][0]["step_s"] < gated["layouts"][0]["step_s"]
    text = printed(*words, "--activation", "relu2")
    assert "mpipar train refuses this command:\n  --activation 'relu2': must be one of" in text


def test_what_cannot_fit_says_so_and_how_many_would():
    text = printed(
        "plan", "llama-70b", "--machine", "h100", "--ranks", "8", "--batch-size", "64", code=1
    )
    assert "no layout fits" in text
    assert "its states alone are" in text
    assert "use 24 devices" in text or "use 32 devices" in text
    text = printed(
        "plan",
        "mpt-30b",
        "--machine",
        "a100-80",
        "--ranks",
        "32",
        "--batch-size",
        "64",
        "--dp",
        "32",
        "--zero",
        "0",
        code=1,
    )
    assert "use another layout: the given parts of it leave none" in text


def test_a_folder_and_a_file_name_the_model(tmp_path):
    (tmp_path / "model.toml").write_text("layers = 4\nd-model = 1024\nheads = 16\nseq-len = 512\n")
    text = printed(
        "plan", tmp_path / "model.toml", "--machine", "a100-80", "--ranks", "2", "--batch-size", "8"
    )
    assert f"--config {tmp_path}/model.toml" in text


def test_the_code_itself_confirms_the_answer():
    text = printed(*WORDS, "--confirm", "--recompute", "block", "--pp", "2", "--dp", "2")
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("mpipar's own step"))
    own = float(lines[first + 1].split()[2])
    said = next(i for i, line in enumerate(lines) if line.startswith("pipeline rank"))
    states = sum(map(float, lines[said + 1].split()[2:5]))
    assert own == pytest.approx(states, rel=0.02)


def test_how_often_to_save():
    text = printed(*WORDS, "--failure-hours", "1600", "--save-seconds", "18")
    # 16 devices: a failure every 100 hours; sqrt(2 * 18 * 360,000) = 3,600 seconds
    assert "every 100.0 hours: save every 60.0 minutes" in text
    assert "take 1.0 % of the time" in text
    wrong = refusal(*WORDS, "--failure-hours", "-1", "--save-seconds", "0").problems
    assert len(wrong) == 2


def test_the_batch_is_chosen_by_its_rate():
    text = printed(
        "plan",
        "gpt2",
        "--machine",
        "a100-80",
        "--ranks",
        "8",
        "--pp",
        "4",
        "--tp",
        "1",
        "--rows",
        "4",
        "--schedule",
        "1f1b",
        "--batch-range",
        "64:512",
    )
    lines = text.splitlines()
    table = lines[
        next(i for i, line in enumerate(lines) if line.startswith("rows of a step")) + 1 :
    ]
    rates = [float(line.split()[2]) for line in table]
    assert rates == sorted(rates)
    assert len(rates) == 4


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("plan", "nosuch", "--machine", "h100", "--ranks", "8"), ["is not a preset"]),
        (
            ("plan", "mixtral-8x7b", "--machine", "h100", "--ranks", "12", "--layout", "ep=3"),
            ["--ep 3: does not divide the 8 experts; use one of 1, 2, 4, 8"],
        ),
        ((*WORDS, "--ep", "2"), ["--ep 2: MODEL llama-8b has no experts"]),
        (("plan", "llama-8", "--machine", "h100", "--ranks", "8"), ["did you mean llama-8b?"]),
        (("plan", "tiny", "--machine", "h100", "--ranks", "0"), ["--ranks 0"]),
        (
            (*WORDS, "--dp", "0", "--headroom", "200", "--memory-limit", "x"),
            ["--dp 0", "--headroom 200", "--memory-limit x"],
        ),
        ((*WORDS, "--tp", "3"), ["is not a multiple of 3"]),
        (
            (*WORDS, "--layout", "dp=3,cp=2,dp=4"),
            ["--layout dp=3,cp=2,dp=4: contradicts --cp 1", "'dp=4' is not understood"],
        ),
        (
            ("plan", ".", "--machine", "h100", "--ranks", "8"),
            ["MODEL .: config.json: No such file"],
        ),
        ((*WORDS, "--chunks", "2"), ["add --schedule interleaved"]),
        ((*WORDS, "--batch-range", "8:4"), ["--batch-range 8:4", "give one of them"]),
        ((*WORDS[:6], "--batch-range", "99999999:99999999"), ["B <= 16,777,216"]),
        (
            (*WORDS[:6], "--batch-size", "0", "--failure-hours", "0"),
            ["--batch-size 0", "--failure-hours 0"],
        ),
        (
            (*WORDS, "--json", "--csv", "--confirm"),
            ["--json and --csv", "--confirm: adds to the text"],
        ),
        ((*WORDS, "--save-seconds", "5"), ["belongs to --failure-hours"]),
        ((*WORDS, "--pp", "1", "--schedule", "zb-v"), ["--pp is 1"]),
        *(
            (("plan", "llama-8b", "--machine", name, "--ranks", "8"), [f"did you mean {meant}"])
            for name, meant in (("h10", "h100?"), ("H100", "h100?"), ("A100", "a100-"))
        ),
        ((*WORDS[:6], "--batch-size", "63", "--dp", "8"), ["use 56 or 64"]),
        ((*WORDS, "--sites", "3:400:10"), ["do not make 3 equal sites"]),
        (("plan", "llama-8b", "--machine", "none.toml", "--ranks", "8"), ["none.toml"]),
        (("plan", "none.toml", "--machine", "h100", "--ranks", "8"), ["none.toml", "No such file"]),
        (
            ("plan", "typos.toml", "--machine", "h100", "--ranks", "8"),
            [
                "d-modl: unknown key; did you mean --d-model?",
                "--ffn = 'relu2' in ",
                "--heads 3 with",
            ],
        ),
    ],
)
def test_refusals_name_everything(words, problems, tmp_path):
    (tmp_path / "typos.toml").write_text('d-modl = 64\nheads = 3\nffn = "relu2"\n')
    text = " ".join(refusal(*words, folder=tmp_path).problems)
    for problem in problems:
        assert problem in text


def test_a_machine_of_ones_own(tmp_path):
    (tmp_path / "mine.toml").write_text(H200)
    text = printed("plan", "llama-8b", "--machine", tmp_path / "mine.toml", "--ranks", "8")
    assert "on 8 x mine" in text


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("mine.json", "{}", "is no data sheet"),
        ("bad.toml", 'basis = "none"\n', "has no"),
        *(
            ("mine.toml", H200.replace(old, new), problem)
            for old, new, problem in (
                ("hbm_gbytes_s = 4800.0", "hbm_gbytes_s = -1", "hbm_gbytes_s is -1"),
                (
                    "joins = 8\ngbytes_s = 410.0",
                    "joins = 8\ngbytes_s = 0",
                    "links[0].gbytes_s is 0",
                ),
                ("joins = 8\n", "joins = 0\n", "the first of links joins 0 devices"),
                (
                    "memory_gib = 140.0",
                    "memory_gib = 1e300",
                    "memory_gib is 1e+300, which cannot be",
                ),
                (
                    'efficiency = "h100"',
                    'efficiency = "x"',
                    "efficiency x: no software is measured on it",
                ),
                ("[[links]]\njoins = 0", MORE_LINKS, "links has 3 levels"),
                ("float16 = ", "float15 = ", "neither bfloat16 nor float16"),
            )
        ),
    ],
)
def test_a_machine_that_cannot_be(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    assert problem in str(refusal("plan", "llama-8b", "--machine", tmp_path / name, "--ranks", "8"))


def test_what_is_given_is_kept_or_refused():
    """An odd row is not cut, a schedule needs a pipeline, gradients are at least as wide."""
    words = ("plan", "gpt2", "--machine", "h100", "--ranks", "8", "--batch-size", "64")
    assert "it fits" in printed(*words, "--seq-len", "1023")
    found = json.loads(printed(*words, "--schedule", "zb-v", "--json"))
    assert {one["layout"]["schedule"] for one in found["layouts"]} == {"zb-v"}
    wrong = refusal(*words, "--dtype", "float32", "--grad-dtype", "bfloat16")
    assert "--grad-dtype bfloat16: is for 16-bit weights" in str(wrong)
    text = printed(*words, "--grad-dtype", "bfloat16")
    assert "mpipar train keeps gradients in float32, whatever --grad-dtype says" in text


def test_other_software_with_the_same_constants_takes_as_long():
    words = (
        "plan",
        "llama-1b",
        "--machine",
        "h100",
        "--ranks",
        "4",
        "--batch-size",
        "8",
        "--pp",
        "4",
        "--schedule",
        "1f1b",
        "--rows",
        "1",
        "--recompute",
        "none",
    )
    text = printed(*words, "--dtype", "bfloat16")
    seconds = re.search(r" ([\d.]+) s a step", text)[1]
    assert f"other software: {seconds} s megatron" in text


def test_json_has_all_batch_sizes():
    found = json.loads(
        printed(
            "plan", "gpt2", "--machine", "h100", "--ranks", "8", "--batch-range", "64:256", "--json"
        )
    )
    assert found["batches"].keys() == {"64", "128", "256"}
    assert found["layouts"][0]["step_s"] in found["batches"].values()


def test_zero_on_one_rank_is_no_answer():
    text = printed("plan", "gpt2", "--machine", "h100", "--ranks", "1", "--zero", "1", code=1)
    assert "no layout can be run" in text
    assert "zero needs two ranks" in text


def test_rows_that_weights_do_not_take_are_refused(tmp_path):
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
    assert "rows of at most 64 tokens" in str(refusal(*words, "128"))
    assert "--seq-len 32" in printed(*words, "32")


def test_a_huge_batch_takes_no_time_and_is_too_much_for_training():
    with at_once():
        text = printed(
            *WORDS[:6],
            "--batch-size",
            str(1 << 24),
            "--pp",
            "2",
            "--tp",
            "1",
            "--dp",
            "8",
            "--schedule",
            "1f1b",
            "--top",
            "1",
        )
    assert "mpipar train refuses this command:\n  --num-microbatches" in text


def test_the_command_resets_what_a_file_sets(tmp_path):
    (tmp_path / "model.toml").write_text(
        'layers = 4\nd-model = 1024\nheads = 16\nseq-len = 512\nrecompute = "block"\n'
        "zero = 1\nsequence-parallel = true\n"
    )
    text = printed(
        "plan",
        tmp_path / "model.toml",
        "--machine",
        "a100-80",
        "--ranks",
        "2",
        "--batch-size",
        "8",
        "--dp",
        "2",
        "--recompute",
        "none",
        "--zero",
        "0",
    )
    lines = text[text.index("mpiexec") :].partition("\n\n")[0]
    for words in ("--recompute none", "--zero 0", "--no-sequence-parallel", "--dtype bfloat16"):
        assert words in lines
    assert "refuses" not in text


def test_the_format_of_numbers_decides_rates_and_bytes():
    half, whole = (
        json.loads(
            printed(
                *WORDS,
                "--json",
                "--dtype",
                dtype,
                "--dp",
                "2",
                "--pp",
                "1",
                "--recompute",
                "block",
                "--rows",
                "1",
                "--zero",
                "0",
            )
        )
        for dtype in ("float16", "float32")
    )
    for name, ratio in (("weights", 2), ("gradients", 1), ("optimizer", 8 / 12), ("stash", 2)):
        sizes = [one["layouts"][0]["memory_bytes"][name] for one in (whole, half)]
        assert sizes[0] == pytest.approx(ratio * sizes[1]), name
    assert whole["layouts"][0]["step_s"] > 5 * half["layouts"][0]["step_s"]
    words = ("plan", "gpt2", "--machine", "v100", "--ranks", "1")
    assert "--dtype float16" in printed(*words)
    assert "v100 has no rate for it; use one of float32, float16" in str(
        refusal(*words, "--dtype", "bfloat16")
    )
