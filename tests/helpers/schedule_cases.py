"""Helpers of the schedule tests: random counts, and a second opinion on schedules.

The emulator executes the instructions of all ranks in the simplest way. It is slow and simple on
purpose, and shares no rule with mpipar.pipeline.check. It acts out what the engine does, with sets
of what has been computed, sent, posted and stashed. Sends are synchronous.
"""

from hypothesis import strategies as st

from mpipar.pipeline.instructions import is_compute, parts
from mpipar.pipeline.schedules.catalog import FAMILIES, SCHEDULES


@st.composite
def counts(draw, max_p=6, max_m=18, max_chunks=4):
    """(name, p, m, chunks) that the schedule accepts."""
    name = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, max_p))
    m = max(draw(st.integers(1, max_m)), FAMILIES[name].rounds * p)
    chunks = draw(st.integers(1, max_chunks)) if FAMILIES[name].looped else None
    return name, p, m, chunks


def compute(schedule, pp_rank):
    return [instr for instr in schedule.programs[pp_rank] if is_compute(instr)]


class Refused(Exception):
    """The schedule cannot run."""


def demand(condition, text):
    if not condition:
        raise Refused(text)


class Rank:
    """One rank with its program, wire instructions included."""

    def __init__(self, schedule, pp_rank, program):
        self.schedule, self.pp_rank, self.program = schedule, pp_rank, program
        self.position = 0
        self.ran, self.posted, self.sent, self.reduced = set(), set(), set(), set()

    def local(self, stage):
        return self.schedule.stage_to_rank[stage] == self.pp_rank

    def step(self, network):
        """Run the next instruction; return False if it must wait. network: messages in transit."""
        instr = self.program[self.position]
        if instr.kind.startswith("SEND"):
            self.send(instr, network)
        elif instr.kind.startswith("RECV"):
            self.post(instr)
        elif instr.kind == "REDUCE_GRAD":
            self.reduce(instr.stage)
        elif not self.compute(instr, network):
            return False
        self.position += 1
        return True

    def send(self, instr, network):
        kind = instr.kind[-1]
        stage = instr.stage + (1 if kind == "F" else -1)
        made = {(each, instr.stage, instr.mb) for each in ("F" if kind == "F" else "BI")}
        demand(made & self.ran, f"{instr} has nothing to send")
        demand(0 <= stage < self.schedule.num_stages, f"{instr} has no receiver")
        demand(not self.local(stage), f"{instr} goes to the same rank")
        message = (kind, stage, instr.mb)
        demand(message not in self.sent, f"{instr} twice")
        self.sent.add(message)
        network.add(message)

    def post(self, instr):
        message = (instr.kind[-1], instr.stage, instr.mb)
        demand(message not in self.posted, f"{instr} twice")
        self.posted.add(message)

    def compute(self, instr, network):
        needed = set()
        for kind, stage, mb in parts(instr):
            demand(kind in ("F", "B", "I", "W"), f"{instr} is no pass")
            demand(0 <= mb < self.schedule.num_microbatches, f"{instr} has no microbatch")
            demand(
                stage in self.schedule.stages_by_rank[self.pp_rank], f"{instr} has no weights here"
            )
            demand((kind, stage, mb) not in self.ran, f"{instr} twice")
            demand(stage not in self.reduced or kind == "F", f"{instr} after its gradients' sum")
            source = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind, -1)
            if kind != "F":
                before = {"B": "F", "I": "F", "W": "I"}[kind]
                demand((before, stage, mb) in self.ran, f"{instr} without its {before}")
                rivals = {(each, stage, mb) for each in {"B": "IW", "I": "B", "W": "B"}[kind]}
                demand(not rivals & self.ran, f"{instr} finds no stash")
            if 0 <= source < self.schedule.num_stages:
                if self.local(source):
                    made = {(each, source, mb) for each in ("F" if kind == "F" else "BI")}
                    demand(made & self.ran, f"{instr} before its producer on this rank")
                else:
                    needed.add(("F" if kind == "F" else "B", stage, mb))
        demand(needed <= self.posted, f"{instr} waits for what was never posted")
        if not needed <= network:
            return False
        network -= needed
        self.posted -= needed
        self.ran |= set(parts(instr))
        return True

    def reduce(self, stage):
        demand(stage in self.schedule.stages_by_rank[self.pp_rank], "sum of foreign gradients")
        demand(stage not in self.reduced, "gradients summed twice")
        for mb in range(self.schedule.num_microbatches):
            demand({("B", stage, mb), ("W", stage, mb)} & self.ran, "gradients not complete")
        self.reduced.add(stage)


def emulate(schedule, programs):
    """Run all programs (with wire instructions) to the end, or raise Refused."""
    ranks = [Rank(schedule, pp_rank, program) for pp_rank, program in enumerate(programs)]
    network = set()
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while rank.position < len(rank.program) and rank.step(network):
                progress = True
    for rank in ranks:
        demand(rank.position == len(rank.program), f"rank {rank.pp_rank} hangs")
        demand(not rank.posted, f"rank {rank.pp_rank} waits for more than was sent")
        demand(rank.reduced == set(schedule.stages_by_rank[rank.pp_rank]), "gradients never summed")
        for stage in schedule.stages_by_rank[rank.pp_rank]:
            for mb in range(schedule.num_microbatches):
                done = {kind for kind in "FBIW" if (kind, stage, mb) in rank.ran}
                demand(done in ({"F", "B"}, {"F", "I", "W"}), f"{stage}, {mb}: {done}")
    demand(not network, "a message was never received")
