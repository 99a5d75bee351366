"""The table of illegal combinations of settings: its rows, their suggestions, nothing besides."""

import ast
import itertools
import re

import pytest
from config_helpers import reading_of
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import refusal
from structure_rules import SOURCES

from docs.build.tables import broken, folder_of_examples, read_words
from mpipar.comm.grid import AXES
from mpipar.config.resolve import resolve
from mpipar.config.sections import FIELDS
from mpipar.config.setting import flag
from mpipar.errors import EXIT_USAGE
from mpipar.pipeline.combinations import RULES

BY_NAME = {rule.name: rule for rule in RULES}


@pytest.fixture(autouse=True)
def files():
    with folder_of_examples() as folder:
        yield folder


def typed(text):
    """The words of an example as {flag: its words}."""
    found, name = {}, None
    for word in text.split():
        name = word if word.startswith("--") else name
        found.setdefault(name, []).append(word)
    return found


def with_cure(words, ranks, field, value):
    """(words, ranks) once one offer of a refusal is typed; None leaves the flag out."""
    if field == "ranks":
        return words, value
    replaced = {flag(axis) for axis in AXES} if field == "layout" else {flag(field)}
    kept = {name: one for name, one in words.items() if name not in replaced}
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if value is not None and value is not False:
        kept[flag(field)] = [flag(field)] if value is True else [flag(field), text]
    return kept, ranks


def broken_rows(words, ranks):
    return broken(list(itertools.chain(*words.values())), ranks)


def offers(rule, values):
    return [(field, value) for field, legal in rule.cures(values).items() for value in legal]


def test_rows_have_names_of_their_own():
    assert len(BY_NAME) == len(RULES) > 50


@pytest.mark.parametrize("name", BY_NAME)
def test_an_example_breaks_its_row_alone_and_is_refused_at_the_start(name, files):
    rule = BY_NAME[name]
    ((row, values),) = broken_rows(typed(rule.example), rule.ranks)
    assert row is rule
    error = refusal("train", *rule.example.split(), ranks=rule.ranks, folder=files)
    assert error.exit_code == EXIT_USAGE
    text = rule.problem(values)
    assert text in error.problems
    assert flag(rule.fields[0]) in text.split(": ")[0] or rule.fields[0] in values.free
    assert [path.name for path in files.iterdir()] == ["1f1b.csv"]


@pytest.mark.parametrize("name", BY_NAME)
def test_everything_that_a_row_offers_is_legal(name):
    rule = BY_NAME[name]
    words = typed(rule.example)
    ((_, values),) = broken_rows(words, rule.ranks)
    found = offers(rule, values)
    assert found
    for field, value in found:
        cured, ranks = with_cure(words, rule.ranks, field, value)
        assert broken_rows(cured, ranks) == [], (field, value)
        assert read_words(list(itertools.chain(*cured.values())))[0].problems == (), (field, value)
        assert flag(field) in rule.cure(values) or field == "ranks"


@given(st.lists(st.sampled_from(RULES), min_size=2, max_size=4, unique=True))
@settings(max_examples=60, deadline=None)
def test_rows_meet(rows):
    """Whatever else is wrong, a row can say what is, and with what it offers it holds."""
    words = {}
    for rule in rows:
        words |= typed(rule.example)
    ranks = max(rule.ranks for rule in rows)
    for rule, values in broken_rows(words, ranks):
        assert rule.reason in rule.problem(values)
        for field, value in offers(rule, values)[:3]:
            left = broken_rows(*with_cure(words, ranks, field, value))
            assert rule not in [one for one, _ in left], (words, ranks, rule.name, field, value)


def test_a_row_with_a_setting_that_could_not_be_read_is_not_judged():
    reading = reading_of("--heads", "x", "--d-model", "33")
    resolve(reading.config, 1, bad=reading.bad, rules=RULES)


def test_weights_that_fix_the_shape_leave_the_rest_to_change():
    """With --init-from no row offers another shape, but what cuts it may change."""
    for rule in RULES:
        ((_, values),) = broken_rows(typed(rule.example), rule.ranks)
        values.init_from = "weights"
        text = rule.cure(values)
        assert not re.findall(r"--(?:heads|kv-heads|layers|d-model|vocab-size|arch)\b", text), text


# --- nothing is beside the table

# Functions whose refusals name two settings of `train`, and why no row of the table does it.
BESIDE = {
    "commands.resume.unchangeable": "compares with a checkpoint",
    "commands.auto.best_of": "known once steps are predicted",
    "commands.generation.layout_problems": "what generate can't do",
    "commands.plan_question.fixed_problems": "arguments of plan",
    "commands.plan_question.question_of": "arguments of plan, and a model",
    "commands.resolve.with_weights_shape": "compares with weights",
    "commands.resume.check_begin": "compares with what the run began with",
    "commands.schedule.problems": "arguments of schedule",
    "config.reading.choice_problems": "the settings of a choice: see `only` of a setting",
    "config.reading.expand_layout": "one setting in two spellings",
    "data.tokenizer.tokenizer_of": "compares with data",
    "data.rows.load": "compares with data",
    "data.source._not_bytes": "compares with data",
}
# Checks of a command that end with exit code 2, beside the table.
CHECKS = {
    "folder_problems": "the disk",
    "problems": "the step of a checkpoint",
    "read_text": "the prompt and a tokenizer",
    "read_texts": "the same, of generate",
    "layout_problems": "what generate can't do",
    "other_than_one_rank": "what verify can't do",
}
FLAGS = {"--layout", "--machine", *map(flag, FIELDS)}
A_FLAG = "--some-flag"  # in place of a name that is put together


def literal(node):
    """The text of a string, with A_FLAG for each call of `flag` in it; "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(
        literal(part)
        if isinstance(part, ast.Constant)
        else A_FLAG
        if ast.unparse(part.value).startswith("flag(")
        else "?"
        for part in node.values
    )


def refusals_of_two(module, source):
    """Functions with a text that begins with a flag, as refusals do, and names another one."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            texts = map(literal, itertools.chain(*map(ast.walk, function.body)))
            for text in texts:
                words = re.findall("--[a-z][a-z0-9-]*", text)
                if text.startswith("--") and len({*words} & FLAGS) + words.count(A_FLAG) > 1:
                    found.add(f"{module}.{function.name}")
    return found


def test_no_refusal_of_two_settings_is_beside_the_table():
    found = set().union(
        *(
            refusals_of_two(module, source)
            for module, source in SOURCES.items()
            if not module.endswith("combinations")
        )
    )
    assert found == set(BESIDE)


def test_no_check_of_a_command_is_beside_the_table():
    pair = r"(?<!isinstance)\((\w+), UsageError\)|return (\w+), UsageError"
    pairs = set().union(*(re.findall(pair, source) for source in SOURCES.values()))
    assert {name for pair in pairs for name in pair if name} == set(CHECKS)


def test_a_refusal_beside_the_table_is_found():
    source = """
def some_problems(run):
    return [f"--trace {run.trace}: not with --tf32" if run.tf32 else "--trace: too late"]
def of_a_name(name):
    raise UsageError(f"{flag(name)}: not with --seed")
def clean():
    return "see --trace and --seed", "--seed: one only"
"""
    assert refusals_of_two("x", source) == {"x.some_problems", "x.of_a_name"}


def test_an_offer_that_is_illegal_is_found():
    """The broken twin of the test of offers."""
    rule = BY_NAME["heads of a rank"]
    ((_, values),) = broken_rows(typed(rule.example), rule.ranks)
    assert ("tp", 4) not in offers(rule, values)
    cured, ranks = with_cure(typed(rule.example), rule.ranks, "tp", 4)
    assert broken_rows(cured, ranks)
