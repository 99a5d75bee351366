"""`mpipar plan`, and `explain` on a machine: what they answer and refuse."""

import json
import re
import shlex

import pytest
from in_process import printed, refusal

from mpipar.study.plan.machine import SHEETS

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


def test_nothing_fits():
    text = printed("plan", "llama-70b", "--machine", "h100", "--ranks", "8", code=1)
    assert text.startswith("no layout fits: ")
    assert re.search(r"on \d+ devices one does", text)
    text = printed("plan", "gpt2", "--machine", "h100", "--ranks", "1", "--zero", "1", code=1)
    assert "leave none that can be run" in text


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
