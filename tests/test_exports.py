"""A step in the formats of other programs: what is written is what the scripts say."""

import functools
import json
from types import SimpleNamespace

import goal_run
import pytest
from google.protobuf import descriptor_pb2 as descriptor
from google.protobuf import descriptor_pool, message_factory, unknown_fields
from in_process import assert_refused, printed

from bench.training import config_of
from mpipar.comm.record import POINT_TO_POINT
from mpipar.commands import export
from mpipar.errors import OutputError
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.simulate import simulate
from mpipar.plan import goal
from mpipar.plan.goal import goal_text
from mpipar.plan.predict import predict
from mpipar.plan.script import CALL, SPAN, WAIT, all_scripts, script_of
from mpipar.train.build import configured_schedule

SMALL = "--layers 2 --num-microbatches 2 --batch-size 24"
LAYOUTS = {
    "hybrid": f"--preset tiny --layout dp=2,pp=2,tp=2 {SMALL}",
    "three": f"--preset tiny --layout dp=3 {SMALL} --zero 1",
    "experts": f"--preset moe-tiny --layout dp=4,ep=2 {SMALL} --zero 3",
    "routed": f"--preset moe-tiny --layout dp=4,ep=4 {SMALL} --routing adversarial",
    "rows": "--preset moe-tiny --layout dp=3,ep=3 --layers 2 --experts 6 --batch-size 12",
    "context": f"--preset tiny --layout dp=2,cp=2,tp=2 {SMALL} --dtype bfloat16",
    "zb-h1": "--preset tiny --layout dp=2,pp=4 --schedule zb-h1",
}
IN_SHORT = ("hybrid", "experts", "routed", "rows")
each_layout = pytest.mark.parametrize(
    "name",
    [
        *IN_SHORT,
        *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in IN_SHORT),
    ],
)


def config_named(name):
    return config_of(LAYOUTS[name].split())


@functools.cache
def scripts_of(name):
    return list(all_scripts(config_named(name)))


def without_times(script):
    return script._replace(
        calls=[
            call._replace(record=call.record._replace(posted_ns=0, waited_ns=0, done_ns=0))
            for call in script.calls
        ]
    )


@each_layout
def test_copies_have_the_scripts_that_they_would_write(name):
    config = config_named(name)
    for rank, script in enumerate(scripts_of(name)):
        assert without_times(script) == without_times(script_of(config, rank))


@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_a_script_is_what_a_step_on_shapes_does(name):
    """Its calls are the records, its FLOPs those of the step, and each posted call is waited for
    once, after its begin.
    """
    config = config_named(name)
    script, prediction = script_of(config, 1), predict(config, 1)
    assert [call.record[3:] for call in script.calls] == [
        record[3:] for record in prediction.recorder.records
    ]
    assert sum(event.flops for event in script.events) == sum(prediction.flops.values())
    begun = [event.number for event in script.events if event.action == CALL]
    assert begun == list(range(len(script.calls)))
    waited = [event.number for event in script.events if event.action == WAIT]
    assert sorted(waited) == [number for number in begun if script.calls[number].posted]
    places = {
        event.number: place for place, event in enumerate(script.events) if event.action == CALL
    }
    assert all(
        places[event.number] < place
        for place, event in enumerate(script.events)
        if event.action == WAIT
    )


def goal_of(scripts):
    return goal_run.parse(b"".join(goal_text(scripts, len(scripts), 1.0)).decode())


@each_layout
def test_goal_text_runs_to_its_end_and_sends_the_bytes_of_the_records(name):
    """A collective's bytes are those of a ring, up to what a division leaves in each round."""
    scripts = scripts_of(name)
    ranks = goal_of(scripts)
    goal_run.execute(ranks, 1000)
    for script, operations in zip(scripts, ranks, strict=True):
        sent = sum(one.size for one in operations.values() if one.verb == "send")
        booked = sum(call.record.wire_bytes for call in script.calls)
        rounding = sum(2 * len(script.groups[call.record.axis]) for call in script.calls)
        assert booked <= sent + rounding
        assert sent <= booked + rounding


def stage_costs(scripts, config, latency):
    """The costs of the stages in FLOPs, which are nanoseconds at 1 GFLOP/s."""
    seconds = {}
    for script in scripts:
        for last, event in enumerate(script.events):
            if event.action == SPAN:
                one = script.passes[event.number]
                seconds[one.kind, one.stage] = sum(
                    each.flops for each in script.events[one.first : last + 1]
                )
    stages = range(configured_schedule(config.grid).num_stages)
    split = "I", 0
    i = tuple(seconds[("I" if split in seconds else "B", stage)] for stage in stages)
    w = tuple(seconds.get(("W", stage), 0) for stage in stages)
    return Costs(f=tuple(seconds["F", stage] for stage in stages), i=i, w=w, latency=latency)


@pytest.mark.parametrize(
    "schedule",
    [
        "1f1b",
        "zb-h1",
        "zb-v",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("naive", "gpipe", "interleaved")),
    ],
)
def test_goal_text_takes_the_time_of_our_simulator(schedule):
    """Another program's reading of a schedule: every rank's last pass ends when ours says."""
    config = config_of(
        f"--preset tiny --layout pp=2 --num-microbatches 4 --schedule {schedule}".split()
    )
    scripts = list(all_scripts(config))
    ranks, latency = goal_of(scripts), 12345
    goal_run.execute(ranks, latency)
    timeline = simulate(configured_schedule(config.grid), stage_costs(scripts, config, latency))
    for operations, spans in zip(ranks, timeline.spans, strict=True):
        computed = [one for one in operations.values() if one.calc is not None]
        assert max(one.end for one in computed) == max(span.end for span in spans)
        assert sum(one.calc for one in computed) == sum(span.end - span.start for span in spans)


def test_a_message_too_few_never_ends(monkeypatch):
    """The executor notices a rank that leaves a round out: another one waits for ever."""
    plain = goal.gathered
    monkeypatch.setattr(
        goal,
        "gathered",
        lambda q, index, part: plain(q, index, part)[:-1] if index == 0 else plain(q, index, part),
    )
    ranks = goal_of(scripts_of("hybrid"))
    with pytest.raises(AssertionError, match="never end"):
        goal_run.execute(ranks)


@pytest.mark.parametrize("q", range(1, 10))
def test_rounds_gather_every_part_once(q):
    """Each rank forwards what it has: after the last round every rank has all q parts."""
    held = [{index} for index in range(q)]
    rounds = [goal.gathered(q, index, 1) for index in range(q)]
    for messages in zip(*rounds, strict=True):
        before = [[(index + step) % q for step in range(len(held[index]))] for index in range(q)]
        for index, (receive, _) in enumerate(messages):
            assert messages[receive.peer][1].peer == index
            assert messages[receive.peer][1].nbytes == receive.nbytes
            held[index] |= set(before[receive.peer][: receive.nbytes])
    assert held == [set(range(q))] * q


# --- Chakra: the public schema as far as it is used, read by the library of protocol buffers.

KIND = descriptor.FieldDescriptorProto
NODE = {
    "id": (1, KIND.TYPE_UINT64),
    "name": (2, KIND.TYPE_STRING),
    "type": (3, KIND.TYPE_INT32),
    "data_deps": (5, KIND.TYPE_UINT64),
    "duration_micros": (7, KIND.TYPE_UINT64),
    "attr": (10, KIND.TYPE_MESSAGE),
}
VALUES = {
    "int32_val": (7, KIND.TYPE_INT32),
    "int64_val": (9, KIND.TYPE_INT64),
    "uint64_val": (13, KIND.TYPE_UINT64),
    "bool_val": (27, KIND.TYPE_BOOL),
    "string_val": (29, KIND.TYPE_STRING),
}
WANTED = {
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "is_cpu_op": "bool_val",
    "pg_name": "string_val",
}
"""The kind of value that ASTRA-sim's reader asks for, of each attribute."""
TYPES = {4: "compute", 5: "send", 6: "recv", 7: "collective"}
KINDS = [
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
]


@functools.cache
def node_class():
    """The class of the schema's nodes. An attribute has a name and one of several values."""
    file = descriptor.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")
    attribute = file.message_type.add(name="Attribute")
    attribute.oneof_decl.add(name="value")
    attribute.field.add(name="name", number=1, type=KIND.TYPE_STRING, label=1)
    for name, (number, kind) in VALUES.items():
        attribute.field.add(name=name, number=number, type=kind, label=1, oneof_index=0)
    node = file.message_type.add(name="Node")
    for name, (number, kind) in NODE.items():
        node.field.add(
            name=name,
            number=number,
            type=kind,
            label=3 if name in ("data_deps", "attr") else 1,
            type_name=".chakra.Attribute" if name == "attr" else None,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("chakra.Node"))


def messages_of(content):
    """The messages of a file; each follows its length, whose last byte is below 128."""
    while content:
        end = next(place for place, byte in enumerate(content) if byte < 0x80) + 1
        length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(content[:end]))
        assert end + length <= len(content)
        yield content[end : end + length]
        content = content[end + length :]


def nodes_of(content):
    """The nodes of a file: dicts by the schema's names."""
    head, *messages = messages_of(content)
    assert head == b"\x0a\x050.0.4", "field 1, the version, and nothing else"
    found = []
    for node in map(node_class().FromString, messages):
        assert not len(unknown_fields.UnknownFieldSet(node))
        for one in node.attr:
            assert one.WhichOneof("value") == WANTED[one.name], one.name
        found.append(
            {name: getattr(node, name) for name in NODE}
            | {"attr": {one.name: getattr(one, WANTED[one.name]) for one in node.attr}}
        )
    return found


@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_chakra_traces_have_the_calls_of_the_scripts(name, tmp_path):
    folder = tmp_path / "traces"
    printed("explain", *LAYOUTS[name].split(), "--chakra", folder)
    groups = json.loads((folder / "comm_groups.json").read_text())
    scripts = scripts_of(name)
    assert len([*folder.iterdir()]) == len(scripts) + 1
    messages = []
    for rank, script in enumerate(scripts):
        nodes = nodes_of((folder / f"step.{rank}.et").read_bytes())
        numbers = [node["id"] for node in nodes]
        assert numbers == list(range(1, len(nodes) + 1))
        for node in nodes:
            assert all(one < node["id"] for one in node["data_deps"])
        calls = [node for node in nodes if TYPES[node["type"]] != "compute"]
        assert [node["name"] for node in calls] == [call.record.name for call in script.calls]
        flops = [node["attr"]["num_ops"] for node in nodes if TYPES[node["type"]] == "compute"]
        assert sum(flops) == sum(event.flops for event in script.events)
        for node, call in zip(calls, script.calls, strict=True):
            given, record = node["attr"], call.record
            ranks = script.groups[record.axis]
            if record.operation in POINT_TO_POINT:
                assert TYPES[node["type"]] == record.operation
                assert given["comm_size"] == record.payload_bytes
                ends = given["comm_src"], given["comm_dst"]
                assert rank == ends[record.operation == "recv"]
                messages.append((record.operation, *ends, given["comm_tag"], given["comm_size"]))
            else:
                assert groups[given["pg_name"]] == list(ranks)
                assert KINDS[given["comm_type"]] == record.operation.removesuffix("v")
                part = len(ranks) if record.operation == "all_gather" else 1
                if record.operation != "all_to_allv":
                    assert given["comm_size"] == record.payload_bytes // part
    sends = sorted(one[1:] for one in messages if one[0] == "send")
    assert sends == sorted(one[1:] for one in messages if one[0] == "recv")
    assert bool(sends) == (config_named(name).grid.pp > 1)


def test_chakra_traces_wait_for_what_the_step_waits_for(tmp_path):
    """A node that follows a wait depends on what was waited for, and not on what is under way."""
    script = next(all_scripts(config_of("--preset tiny --layout dp=2".split())))
    folder = tmp_path / "traces"
    printed("explain", "--preset", "tiny", "--layout", "dp=2", "--chakra", folder, "--gflops", 1)
    nodes = nodes_of((folder / "step.0.et").read_bytes())
    buckets = {node["id"] for node in nodes if node["name"] == "grads.bucket"}
    (norm,) = [node for node in nodes if node["name"] == "step.norm"]
    assert buckets <= {*norm["data_deps"]}
    for node in nodes:
        if node is not norm:
            assert not buckets & {*node["data_deps"]}
    first = next(event.flops for event in script.events if event.flops)
    assert nodes[0]["attr"]["num_ops"] == first
    assert nodes[0]["duration_micros"] == round(first * 1e-3)


# --- refusals

HYBRID = ("explain", "--layout", "dp=2")


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--goal", "a"), 2, ["--goal a", "--gflops 1000"]),
        (("--gflops", "3"), 2, ["--goal FILE or --chakra FOLDER"]),
        (("--goal", "a", "--gflops", "0"), 2, ["--gflops 0", "greater than 0"]),
        (("--goal", "a", "--gflops", "3", "--rank", "0"), 2, ["leave --rank"]),
        (("--goal", ".", "--gflops", "3"), 74, ["is a folder"]),
        (("--goal", "missing/a", "--gflops", "3"), 74, ["missing/a", "No such file"]),
        (("--chakra", "."), 74, ["exists already"]),
        (("--chakra", "missing/a"), 74, ["missing/a", "No such file"]),
    ],
)
def test_what_cannot_be_written_is_refused(words, code, parts, tmp_path):
    assert_refused(code, parts, *HYBRID, *words, folder=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_fails_half_way_is_not_there(tmp_path, monkeypatch):
    config = config_of(["--layout", "dp=2"])
    old = tmp_path / "a.goal"
    old.write_text("as it was")
    plain = export.all_scripts

    def failing(config):
        yield next(plain(config))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "all_scripts", failing)
    with pytest.raises(OutputError, match="No space left"):
        export.write_goal(config, str(old), 1.0)
    with pytest.raises(OutputError, match="No space left"):
        export.write_chakra(config, str(tmp_path / "traces"), None)
    assert [one.name for one in tmp_path.iterdir()] == ["a.goal"]
    assert old.read_text() == "as it was"


def test_what_does_not_fit_on_the_disk_is_refused_at_once(tmp_path, monkeypatch):
    config = config_of(["--layout", "dp=2"])
    monkeypatch.setattr(export.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="2 ranks need about"):
        export.write_goal(config, str(tmp_path / "a"), 1.0)
    with pytest.raises(OutputError, match="2 ranks need about"):
        export.write_chakra(config, str(tmp_path / "b"), None)
    assert not [*tmp_path.iterdir()]
