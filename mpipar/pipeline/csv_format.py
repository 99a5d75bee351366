"""Schedules as CSV files, in the form that torch.distributed.pipelining writes and reads.

A row is a rank. A cell is an instruction such as 2F0 (stage 2, forward, microbatch 0). Empty cells
are idle time, which is ignored here. Files are written with passes alone. Of those that are read,
SEND_F RECV_F SEND_B RECV_B are skipped, because messages follow from the passes, and UNSHARD and
RESHARD, because here `--zero` decides when weights are gathered.
"""

import csv
import re
from pathlib import Path
from typing import TextIO

from mpipar.errors import OutputError, UsageError
from mpipar.pipeline.check import check
from mpipar.pipeline.instructions import WIRE_KINDS, Instr, Schedule, is_compute, parts
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.catalog import with_reduce_grad

NUMBER = "([0-9]{1,6})"  # of a stage or microbatch; no schedule has that many
CELL = re.compile(
    rf"{NUMBER}(F|B|I|W|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD){NUMBER}?"
)
OVERLAP = re.compile(rf"\({NUMBER}F{NUMBER};{NUMBER}B{NUMBER}\)OVERLAP_F_B")
MOST_CHARACTERS = 8 << 20  # of a file
MOST_CELLS = 1 << 19  # passes, and their messages
WITHOUT_MB = ("REDUCE_GRAD", "UNSHARD", "RESHARD")
SKIPPED = ("UNSHARD", "RESHARD", *WIRE_KINDS)


def print_csv(schedule: Schedule, file: TextIO) -> None:
    """Write a schedule to an open text file, such as standard output."""
    writer = csv.writer(file, lineterminator="\n")
    for program in schedule.programs:
        writer.writerow(str(instr) for instr in program if is_compute(instr))


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write a schedule to a file; raises OutputError if the file cannot be written."""
    try:
        with path.open("w", newline="", encoding="ascii") as file:
            print_csv(schedule, file)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from error


def read_csv(path: Path) -> Schedule:
    """Return the proved schedule of a file; UsageError names what cannot be read or cannot run."""
    try:
        rows = list(csv.reader(read_text(path).splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    problems, programs, count = [], [], 0
    for row, cells in enumerate(rows):
        texts = [(column, text.strip()) for column, text in enumerate(cells) if text.strip()]
        count += len(texts)
        if count > MOST_CELLS:
            raise UsageError(f"{path}: more than {MOST_CELLS:,} instructions")
        instrs = [(column, text, parse_instruction(text)) for column, text in texts]
        problems += [
            f"{path}: rank {row} column {column}: {text[:80]!r} is not an instruction such as 2F0"
            for column, text, instr in instrs
            if instr is None
        ]
        programs.append([instr for *_, instr in instrs if instr and instr.kind not in SKIPPED])
    if problems:
        raise UsageError(problems[:20])
    while programs and not programs[-1]:  # blank lines at the end
        programs.pop()
    if not all(programs) or not programs:
        raise UsageError(f"{path}: every rank needs a row of instructions")
    schedule = assemble_schedule(path, programs)
    check(schedule)
    return schedule


def read_text(path: Path) -> str:
    """Return the text of a file; UsageError for one that is too large, or no regular file."""
    path.stat()  # says why there is no file
    if not path.is_file():  # a pipe could block
        what = "is a folder, a pipe or a device; give a regular file"
        raise UsageError(f"cannot read {path}: {what}")
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"{path} is too large; the limit is {MOST_CHARACTERS:,} characters")
    return text


def parse_instruction(text: str) -> Instr | None:
    """Return the instruction of a cell, or None."""
    if match := OVERLAP.fullmatch(text):
        stage, mb, stage_b, mb_b = map(int, match.groups())
        return Instr("OVERLAP_F_B", stage, mb, stage_b, mb_b)
    match = CELL.fullmatch(text)
    if match is None or bool(match[3]) == (match[2] in WITHOUT_MB):
        return None
    return Instr(match[2], int(match[1]), int(match[3] or -1))


def assemble_schedule(path: Path, programs: list[list[Instr]]) -> Schedule:
    """Return the schedule of these programs; fill in counts, placement and missing REDUCE_GRAD."""
    passes = [
        (pp_rank, stage, mb)
        for pp_rank, program in enumerate(programs)
        for instr in program
        if is_compute(instr)
        for _, stage, mb in parts(instr)
    ]
    if not passes:
        raise UsageError(f"{path}: no pass (F, B, I, W) of any stage")
    num_stages = 1 + max(stage for _, stage, _ in passes)
    num_microbatches = 1 + max(mb for *_, mb in passes)
    if num_stages * num_microbatches > len(passes):
        raise UsageError(
            f"{path}: stages up to {num_stages - 1} and microbatches up to {num_microbatches - 1}, "
            f"but only {len(passes)} passes"
        )
    p = len(programs)
    if not any(instr.kind == "REDUCE_GRAD" for program in programs for instr in program):
        programs = [list(with_reduce_grad(program)) for program in programs]
    order = tuple(map(tuple, programs))
    candidates = [
        Schedule(path.name, p, num_stages, num_microbatches, name, order)
        for name, placement in PLACEMENTS.items()
        if placement.fits(p, num_stages)
    ]
    if not candidates:
        raise UsageError(
            f"{path}: {num_stages} stages on {p} ranks: not one on each rank, nor a multiple"
        )
    # A file with a mistake still gets the placement that most of it fits; `check` names the
    # mistake.
    return max(
        candidates,
        key=lambda each: sum(each.stage_to_rank[stage] == pp_rank for pp_rank, stage, _ in passes),
    )
