"""A step in the formats of other programs: what is written is what the scripts say."""

import functools
import json
from types import SimpleNamespace

import goal_run
import pytest
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
    "convnet": "--preset digits --layout dp=2,tp=2,pp=2",
}
IN_SHORT = ("hybrid", "experts", "routed", "rows")
each_layout = pytest.mark.parametrize("name", [
    *IN_SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS
                 if name not in IN_SHORT)])


def config_named(name):
    return config_of(LAYOUTS[name].split())


@functools.cache
def scripts_of(name):
    return list(all_scripts(config_named(name)))


def without_times(script):
    return script._replace(calls=[call._replace(record=call.record._replace(
        posted_ns=0, waited_ns=0, done_ns=0)) for call in script.calls])


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
        record[3:] for record in prediction.recorder.records]
    assert sum(event.flops for event in script.events) == sum(prediction.flops.values())
    begun = [event.number for event in script.events if event.action == CALL]
    assert begun == list(range(len(script.calls)))
    waited = [event.number for event in script.events if event.action == WAIT]
    assert sorted(waited) == [number for number in begun if script.calls[number].posted]
    places = {event.number: place for place, event in enumerate(script.events)
              if event.action == CALL}
    assert all(places[event.number] < place for place, event in enumerate(script.events)
               if event.action == WAIT)


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
                    each.flops for each in script.events[one.first:last + 1])
    stages = range(configured_schedule(config.grid).num_stages)
    split = "I", 0
    i = tuple(seconds[("I" if split in seconds else "B", stage)] for stage in stages)
    w = tuple(seconds.get(("W", stage), 0) for stage in stages)
    return Costs(f=tuple(seconds["F", stage] for stage in stages), i=i, w=w, latency=latency)


@pytest.mark.parametrize("schedule", [
    "1f1b", "zb-h1", "zb-v", *(pytest.param(name, marks=pytest.mark.slow)
                               for name in ("naive", "gpipe", "interleaved"))])
def test_goal_text_takes_the_time_of_our_simulator(schedule):
    """Another program's reading of a schedule: every rank's last pass ends when ours says."""
    config = config_of(f"--preset tiny --layout pp=2 --num-microbatches 4 --schedule {schedule}"
                       .split())
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
    monkeypatch.setattr(goal, "gathered", lambda q, index, part: (
        plain(q, index, part)[:-1] if index == 0 else plain(q, index, part)))
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
            held[index] |= set(before[receive.peer][:receive.nbytes])
    assert held == [set(range(q))] * q


# --- Chakra: the field numbers of the public schema, and a reader of protocol buffers of its own.

NODE = {1: "id", 2: "name", 3: "type", 4: "ctrl_deps", 5: "data_deps", 6: "start_time_micros",
        7: "duration_micros", 8: "inputs", 9: "outputs", 10: "attr", 11: "storage"}
VALUES = {3: "double_val", 5: "float_val", 7: "int32_val", 9: "int64_val", 11: "uint32_val",
          13: "uint64_val", 27: "bool_val", 29: "string_val", 31: "bytes_val"}
WANTED = {"comm_type": "int64_val", "comm_size": "int64_val", "comm_src": "int32_val",
          "comm_dst": "int32_val", "comm_tag": "int32_val", "num_ops": "int64_val",
          "tensor_size": "uint64_val", "is_cpu_op": "bool_val", "pg_name": "string_val"}
"""The kind of value that ASTRA-sim's reader asks for, of each attribute."""
TYPES = {4: "compute", 5: "send", 6: "recv", 7: "collective"}
KINDS = ["all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
         "reduce_scatter", "reduce_scatter_block", "barrier"]


def number_at(content, at):
    value = shift = 0
    while True:
        byte = content[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def fields(content):
    """[(number, value)]: whole numbers, and bytes of anything longer."""
    at, found = 0, []
    while at < len(content):
        key, at = number_at(content, at)
        value, at = number_at(content, at)
        assert key & 7 in (0, 2), key
        if key & 7 == 2:
            value, at = content[at:at + value], at + value
            assert at <= len(content)
        found.append((key >> 3, value))
    return found


def attribute_of(content):
    (name, text), (kind, value) = fields(content)
    assert name == 1
    label = text.decode()
    assert VALUES[kind] == WANTED[label], label
    return label, value.decode() if isinstance(value, bytes) else value


def nodes_of(content):
    """The nodes of a file: dicts by the schema's names."""
    at, messages = 0, []
    while at < len(content):
        length, at = number_at(content, at)
        messages.append(content[at:at + length])
        at += length
    assert at == len(content)
    assert fields(messages[0]) == [(1, b"0.0.4")]
    found = []
    for message in messages[1:]:
        node = {"data_deps": [], "attr": {}}
        for number, value in fields(message):
            if NODE[number] == "data_deps":
                place = 0
                while place < len(value):
                    one, place = number_at(value, place)
                    node["data_deps"].append(one)
            elif NODE[number] == "attr":
                label, content_ = attribute_of(value)
                node["attr"][label] = content_
            else:
                node[NODE[number]] = value
        found.append(node)
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
        assert [node["name"].decode() for node in calls] == [
            call.record.name for call in script.calls]
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
    buckets = {node["id"] for node in nodes if node["name"] == b"grads.bucket"}
    (norm,) = [node for node in nodes if node["name"] == b"step.norm"]
    assert buckets <= {*norm["data_deps"]}
    for node in nodes:
        if node is not norm:
            assert not buckets & {*node["data_deps"]}
    first = next(event.flops for event in script.events if event.flops)
    assert nodes[0]["attr"]["num_ops"] == first
    assert nodes[0]["duration_micros"] == round(first * 1e-3)


@pytest.mark.tensorboard
def test_protocol_buffers_of_a_library_read_the_same(tmp_path):
    """The schema by a real library, which comes with tensorboard."""
    from google.protobuf import descriptor_pb2 as descriptor
    from google.protobuf import descriptor_pool, message_factory

    def message(file, name, *members):
        one = file.message_type.add(name=name)
        for label, number, kind, repeated, of in members:
            one.field.add(name=label, number=number, type=kind, label=3 if repeated else 1,
                          type_name=of)

    file = descriptor.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")
    message(file, "Attribute", ("name", 1, 9, False, None), ("int32_val", 7, 5, False, None),
            ("int64_val", 9, 3, False, None), ("uint64_val", 13, 4, False, None),
            ("bool_val", 27, 8, False, None), ("string_val", 29, 9, False, None))
    message(file, "Node", ("id", 1, 4, False, None), ("name", 2, 9, False, None),
            ("type", 3, 5, False, None), ("data_deps", 5, 4, True, None),
            ("duration_micros", 7, 4, False, None), ("attr", 10, 11, True, ".chakra.Attribute"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("chakra.Node"))
    folder = tmp_path / "traces"
    printed("explain", *LAYOUTS["hybrid"].split(), "--chakra", folder, "--gflops", 10)
    content = (folder / "step.3.et").read_bytes()
    at, own = 0, nodes_of(content)
    length, at = number_at(content, at)
    at += length
    for node in own:
        length, at = number_at(content, at)
        theirs = kind.FromString(content[at:at + length])
        at += length
        assert (theirs.id, theirs.name.encode(), theirs.type, [*theirs.data_deps]) == (
            node["id"], node["name"], node["type"], node["data_deps"])
        assert {one.name: getattr(one, WANTED[one.name]) for one in theirs.attr} == node["attr"]


# --- refusals

HYBRID = ("explain", "--layout", "dp=2")


@pytest.mark.parametrize(("words", "code", "parts"), [
    (("--goal", "a"), 2, ["--goal a", "--gflops 1000"]),
    (("--gflops", "3"), 2, ["--goal FILE or --chakra FOLDER"]),
    (("--goal", "a", "--gflops", "0"), 2, ["--gflops 0", "greater than 0"]),
    (("--goal", "a", "--gflops", "3", "--rank", "0"), 2, ["leave --rank"]),
    (("--goal", ".", "--gflops", "3"), 74, ["is a folder"]),
    (("--goal", "missing/a", "--gflops", "3"), 74, ["missing/a", "No such file"]),
    (("--chakra", "."), 74, ["exists already"]),
    (("--chakra", "missing/a"), 74, ["missing/a", "No such file"]),
])
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

