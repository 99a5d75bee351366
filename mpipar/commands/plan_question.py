"""What `mpipar plan` is asked: model, machine, batch and given parts of the layout, all checked."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from dataclasses import replace

from mpipar.checkpoint.formats import model_settings
from mpipar.config.presets import PRESETS
from mpipar.config.reading import expand_layout, read
from mpipar.config.resolve import config_problems
from mpipar.config.sections import build
from mpipar.config.sizes import read_bytes
from mpipar.errors import DataError, UsageError, suggestion
from mpipar.files.text import brief
from mpipar.plan.cluster import STACKS, Cluster, load_cluster
from mpipar.plan.confirm import Job
from mpipar.plan.formats import FORMATS
from mpipar.plan.mixed import Kind
from mpipar.plan.search import FIXED, Question
from mpipar.plan.shape import Shape
from mpipar.plan.sites import Sites

MOST_RANKS = 1 << 17
MOST_ROWS = 1 << 24  # of a step
ACTIVATIONS = ("gelu", "swiglu", "relu2")
ONE_KIND = ("memory_limit", "batch_range", "csv", "html", "confirm", "sites", "failure_hours")


def names_kinds(machine: str) -> bool:
    """Whether --machine names several kinds of devices, as a100-80:4,h100:4."""
    return ":" in machine


def named_machines(text: str) -> dict[str, int]:
    """{name: devices} of --machine; 0 devices of a single one. Raises UsageError."""
    if not names_kinds(text):
        return {text: 0}
    parts = [part.rpartition(":") for part in text.split(",")]
    found = {name: int(count) for name, _, count in parts if count.isdecimal() and len(count) < 9}
    if len(found) < max(2, len(parts)) or not all(found) or not all(found.values()):
        raise UsageError(f"--machine {brief(text)}: several kinds are machines with their devices,"
                         " each machine once, as a100-80:4,h100:4")
    return found


def clusters_of(names, dtype: str | None) -> tuple[list[Cluster], str]:
    """(machines with the rates of a number format, that format).

    By default it is the one of 16 bits that all have. Raises UsageError and DataError.
    """
    clusters = [load_cluster(name) for name in names]
    dtype = dtype or min((cluster.dtype_16 for cluster in clusters), key=FORMATS.index)
    found = []
    for cluster in clusters:
        if dtype not in cluster.peak_tflops:
            known = [one for one in FORMATS if one in cluster.peak_tflops]
            found.append(f"--dtype {dtype}: {cluster.name} has no rate for it; use one of"
                         f" {', '.join(known)}")
    if found:
        raise UsageError(found)
    return [cluster.with_dtype(dtype) for cluster in clusters], dtype


def room(gib: float, headroom: float) -> float:
    """GiB that a rank may use."""
    return gib * (1 - headroom / 100)


def question_of(args, job: Job) -> tuple[Question, tuple[Kind, ...]]:
    """What the flags ask of a model, and the kinds of devices if there are several.

    Raises UsageError with everything that is wrong.
    """
    model, problems = job.config.model, []
    if model.model != "decoder":
        problems.append(f"MODEL {brief(args.model)}: is a {model.model}; plans are for decoders")
    elif args.seq_len is not None:
        if job.flags.startswith("--init-from"):
            problems += row_problems(model, args.seq_len)
        model = replace(model, seq_len=args.seq_len, max_positions=None)
    preset = PRESETS[job.config.run.preset]["batch_size"]
    batch = job.config.train.batch_size or preset if args.batch_size is None else args.batch_size
    problems += number_problems(args, batch, getattr(model, "seq_len", 1))
    machines = named_machines(args.machine)
    clusters, dtype = clusters_of(machines, args.dtype)
    kinds = tuple(Kind(cluster, count, room(cluster.memory_gib, args.headroom))
                  for cluster, count in zip(clusters, machines.values(), strict=True) if count)
    devices = sum(kind.ranks for kind in kinds)
    if kinds and devices != args.ranks:
        problems.append(f"--ranks {args.ranks}: the kinds of --machine have {devices} devices")
    gib = clusters[0].memory_gib
    if args.memory_limit is not None:
        try:
            gib = read_bytes(args.memory_limit) / (1 << 30)
        except ValueError as error:
            problems.append(f"--memory-limit {brief(args.memory_limit)}: {error}")
    fixed = expand_layout({name: getattr(args, name) for name in (*FIXED, "layout")
                           if getattr(args, name) is not None}, problems)
    problems += [*fixed_problems(args, fixed), *unused_problems(args)]
    if args.sites is not None:
        problems += problems_of(sites_of, args.sites)
    if args.batch_range is not None:
        found = problems_of(batch_range, args.batch_range)
        batch = batch if found else batch_range(args.batch_range)[0]
        problems += found
        if args.batch_size is not None:
            problems.append("--batch-size and --batch-range: give one of them")
    if problems:
        raise UsageError(problems)
    # Groups of tp lie inside the nodes of every kind.
    cluster = min(clusters, key=Cluster.per_node)
    question = Question(
        shape_of(model, args.activation), cluster, STACKS[args.stack].with_dtype(dtype), args.ranks,
        batch, room(gib, args.headroom), fixed, args.mfu_rule, dtype)
    return question, kinds


def shape_of(model, activation: str | None) -> Shape:
    """The Shape of a model, with another activation function if one is given."""
    shape = Shape.of(model.completed())
    return shape._replace(activation=activation or shape.activation)


def problems_of(read: Callable, text: str) -> list[str]:
    """What a reader of a flag's text says against it."""
    try:
        read(text)
    except UsageError as error:
        return error.problems
    return []


def number_problems(args, batch: int, seq_len: int) -> list[str]:
    """Numbers that are too small or too large."""
    limits = {"--ranks": (args.ranks, 1, MOST_RANKS), "--batch-size": (batch, 1, MOST_ROWS),
              "--seq-len": (seq_len, 1, 1 << 24), "--top": (args.top, 1, 100)}
    found = [f"{flag} {brief(str(value))}: must be from {low} to {high:,}"
             for flag, (value, low, high) in limits.items() if not low <= value <= high]
    found += [f"{flag} {value:g}: must be more than 0" for flag, value in (
        ("--failure-hours", args.failure_hours), ("--save-seconds", args.save_seconds))
        if value is not None and not 0 < value < 1e12]
    if not 0 <= args.headroom < 100:
        found.append(f"--headroom {args.headroom:g}: is a share of the memory in percent; use a"
                     " number from 0 to 99")
    return found


def batch_range(text: str) -> tuple[int, int]:
    """A and B of --batch-range. Raises UsageError."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and len(text) < 20
            and 1 <= int(first) <= int(last) <= min(int(first) << 12, MOST_ROWS)):
        raise UsageError(f"--batch-range {brief(text)}: must be A:B with 1 <= A <= B <="
                         f" {MOST_ROWS:,}, as in 256:2048")
    return int(first), int(last)


def sites_of(text: str) -> Sites:
    """The sites of --sites. Raises UsageError."""
    try:
        count, gbits, milliseconds = text.split(":")
        sites = Sites(int(count), float(gbits), float(milliseconds))
    except ValueError:
        sites = Sites(0, 0, 0)
    if not (2 <= sites.count <= 1024 and 0 < sites.gbits <= 1e6 and 0 <= sites.milliseconds <= 1e4):
        raise UsageError(f"--sites {brief(text)}: must be sites, Gbit/s and milliseconds, as in"
                         " 2:400:10")
    return sites


def row_problems(model, seq_len: int) -> list[str]:
    """What keeps weights from reading rows of so many tokens. model: theirs."""
    if model.positions == "learned" and seq_len != model.seq_len:
        return [(f"--seq-len {seq_len}: the weights have learned positions of {model.seq_len}"
                 " tokens; leave it out")]
    if model.positions == "rope" and seq_len > model.completed().max_positions:
        return [(f"--seq-len {seq_len}: the weights are made for rows of"
                 f" {model.completed().max_positions} tokens at most; use that, or leave it out")]
    return []


def unused_problems(args) -> list[str]:
    """Flags that would change nothing beside the others."""
    found = ["--json and --csv: give one of them"] if args.json and args.csv else []
    alone = "--json" if args.json else "--csv" if args.csv else None
    given = {"--confirm": args.confirm, "--sites": args.sites is not None,
             "--failure-hours": args.failure_hours is not None}
    found += [f"{flag}: adds to the text, and {alone} prints none; give one of them"
              for flag, is_given in given.items() if is_given and alone]
    if names_kinds(args.machine):
        found += [f"--{name.replace('_', '-')}: is for one kind of device; leave it out"
                  for name in ONE_KIND if getattr(args, name)]
    if args.save_seconds is not None and args.failure_hours is None:
        found.append(f"--save-seconds {args.save_seconds:g}: belongs to --failure-hours; add it, or"
                     " leave it out")
    return found


def fixed_problems(args, fixed: dict) -> list[str]:
    """What is wrong with the given parts of a layout."""
    found = []
    product = 1
    for name in ("dp", "pp", "cp", "tp", "chunks", "rows", "num_microbatches"):
        if name in fixed and fixed[name] < 1:
            found.append(f"--{name.replace('_', '-')} {fixed[name]}: must be at least 1")
        elif name in ("dp", "pp", "cp", "tp"):
            product *= fixed.get(name, 1)
    if "chunks" in fixed and fixed.get("schedule") != "interleaved":
        found.append(f"--chunks {fixed['chunks']}: only interleaved takes any number; add"
                     " --schedule interleaved, or leave it out")
    if fixed.get("pp") == 1 and "schedule" in fixed:
        found.append(f"--schedule {fixed['schedule']}: orders the passes of several stages, and"
                     " --pp is 1; give one of them")
    if not found and args.ranks > 0 and args.ranks % product:
        found.append(f"--ranks {args.ranks}: is not a multiple of {product}, the ranks of the given"
                     f" axes; use {-(-args.ranks // product) * product}, or leave an axis out")
    return found


def job_of(text: str) -> Job:
    """The Job of a preset, a TOML file or a folder. Raises UserErrors."""
    quoted = shlex.quote(text)
    if text in PRESETS:
        return Job(build({"preset": text}), f"--preset {quoted}")
    if text.endswith(".toml"):
        reading = read(argparse.Namespace(config=text))
        if reading.problems:
            raise UsageError([*reading.problems, *config_problems(reading.config)])
        config, flags = reading.config, f"--config {quoted}"
    elif os.path.isdir(text) or os.path.basename(text) == "config.json":
        folder = text if os.path.isdir(text) else os.path.dirname(text) or "."
        config = build(model_settings(folder, where=f"MODEL {brief(text)}"))
        flags = f"--init-from {shlex.quote(folder)}"
    else:
        close = suggestion(text, list(PRESETS))
        raise UsageError(f"MODEL {brief(text)}: is no preset{close}; use one of"
                         f" {', '.join(PRESETS)}, a file that ends in .toml, or a folder with"
                         " config.json")
    if wrong := config_problems(config):
        raise DataError([f"MODEL {brief(text)}: {one}" for one in wrong])
    return Job(config, flags)
