"""The simulator's event loop: ranks that may share cores, and messages on links.

Times are exact for ints and Fractions as long as no core is shared. A rank is *in MPI* between its
passes and between the parts of a pass, while it waits, and after its program. A *rendezvous*
message is one that is too large to be sent ahead: it first asks its receiver, which answers once it
is in MPI and has posted the receive, and then leaves as soon as its sender is in MPI. While a
message leaves, a pass of its sender gets its core minus the fraction that sending takes.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from mpipar.pipeline.check import circle
from mpipar.pipeline.instructions import (
    WIRE_KINDS,
    Instr,
    Message,
    Schedule,
    ScheduleError,
    is_compute,
    neighbours,
    on_wire,
)
from mpipar.study.schedules.costs import Costs, Number


class Span(NamedTuple):
    """The time one instruction ran; REDUCE_GRAD and wire instructions take no time."""

    instr: Instr
    start: Number
    end: Number


class Events:
    """One run of a schedule's programs.

    duration: the time of a pass on a core of its own. spans, messages: by pipeline rank, what ran
    when, and the number of messages sent. Where messages are a rendezvous, programs state their
    communication.
    """

    def __init__(self, schedule: Schedule, costs: Costs, duration: Callable[[Instr], Number]):
        self.schedule, self.costs, self.duration = schedule, costs, duration
        ranks = range(schedule.pp_size)
        self.position, self.messages = [0 for _ in ranks], [0 for _ in ranks]
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.now: Number = 0
        self.work: Number = 0  # core time that every computing rank has received up to now
        self.computing: dict[int, Number] = {}  # rank: the start of its pass
        self.ends: list[tuple[Number, int, int]] = []  # a heap: work at the end, rank, parts left
        self.arrivals: list[tuple[Number, int, Message]] = []  # a heap, in order of departure
        self.arrived: set[Message] = set()  # and not yet taken
        self.waiting: dict[Message, int] = {}  # the rank that waits for it
        self.free: dict[tuple[int, int], Number] = {}  # when a link has sent all it was given
        self.departures = 0
        self.units = costs.by_stage("units", schedule.num_stages)
        self.rendezvous = costs.is_rendezvous()
        self.open: set[Message] = set()  # posted receives
        self.asking: dict[int, list[Message]] = {pp_rank: [] for pp_rank in ranks}  # by receiver
        self.answered: dict[int, list[Message]] = {pp_rank: [] for pp_rank in ranks}  # by sender

    def run(self) -> None:
        """Run all programs to their ends, or raise ScheduleError with the ranks that hang."""
        for pp_rank in range(self.schedule.pp_size):
            self._go_on(pp_rank)
        while self.ends or self.arrivals:
            end = self._next_end() if self.ends else inf
            if self.arrivals and self.arrivals[0][0] <= end:
                self._pass_time(self.arrivals[0][0])
                self._arrive(heappop(self.arrivals)[2])
            else:
                self._pass_time(end)
                _, pp_rank, left = heappop(self.ends)
                self._end_part(pp_rank, left)
        if self.waiting:
            raise ScheduleError(circle(self.schedule, self.waiting))

    # Ranks that compute at the same time get equal shares of the cores. Ranks that wait, or have
    # ended their program, sleep.

    def _slowdown(self) -> Number:
        """Return how much longer a pass takes now than on a core of its own."""
        if self.costs.cores is None:
            return 1
        ranks_per_core = len(self.computing) / self.costs.cores
        return ranks_per_core * self.costs.sharing if ranks_per_core > 1 else 1

    def _next_end(self) -> Number:
        """Return when the next pass ends if no other begins."""
        work = self.ends[0][0]
        if self.costs.cores is None:
            return work
        return self.now + max(0, work - self.work) * self._slowdown()

    def _pass_time(self, until: Number) -> None:
        if self.costs.cores is None:
            self.work = until
        else:
            self.work += (until - self.now) / self._slowdown()
        self.now = until

    # Instructions.

    def _go_on(self, pp_rank: int) -> None:
        """Run a rank's instructions until one takes time or waits, or the program ends."""
        self._enter_mpi(pp_rank)
        program = self.schedule.programs[pp_rank]
        while self.position[pp_rank] < len(program):
            instr = program[self.position[pp_rank]]
            received, _ = on_wire(self.schedule, instr)
            for message in received:
                if message not in self.arrived:
                    self.waiting[message] = pp_rank
                    return
            self.arrived.difference_update(received)
            if is_compute(instr):
                self.computing[pp_rank] = self.now
                self._begin_part(pp_rank, self._parts(instr))
                return
            if self.rendezvous and instr.kind in WIRE_KINDS:
                self._post_receives(instr)
            self._done(pp_rank, self.now)

    def _parts(self, instr: Instr) -> int:
        """Return the number of simulated parts of a pass: more than one only for rendezvous."""
        return max(1, int(self.units[instr.stage])) if self.rendezvous else 1

    def _begin_part(self, pp_rank: int, left: int) -> None:
        instr = self.schedule.programs[pp_rank][self.position[pp_rank]]
        work = self.duration(instr)
        if (parts := self._parts(instr)) > 1:
            work /= parts
        work += self._sending(pp_rank, work)
        heappush(self.ends, (self.work + work, pp_rank, left))

    def _sending(self, pp_rank: int, work: Number) -> Number:
        """Return how much longer a part of a pass takes because its rank's messages are leaving."""
        share = self.costs.sending
        if not share:
            return 0
        left = sum(
            max(0, free - self.now) for (source, _), free in self.free.items() if source == pp_rank
        )
        if work < left * (1 - share):  # the part ends first
            left = work / (1 - share)
        return share * left

    def _end_part(self, pp_rank: int, left: int) -> None:
        if left > 1:
            self._enter_mpi(pp_rank)
            self._begin_part(pp_rank, left - 1)
        else:
            self._done(pp_rank, self.computing.pop(pp_rank))
            self._go_on(pp_rank)

    def _done(self, pp_rank: int, start: Number) -> None:
        """Record the end of the rank's instruction, and hand over what it sends."""
        instr = self.schedule.programs[pp_rank][self.position[pp_rank]]
        self.spans[pp_rank].append(Span(instr, start, self.now))
        self.position[pp_rank] += 1
        for message in on_wire(self.schedule, instr)[1]:
            self.messages[pp_rank] += 1
            if not self.rendezvous or (
                message in self.open and message.target not in self.computing
            ):
                self._depart(message)
            else:
                self.asking[message.target].append(message)

    # Messages.

    def _depart(self, message: Message) -> None:
        """Queue a message on its link, which sends one message after another."""
        link = message.source, message.target
        start = max(self.now, self.free.get(link, 0))
        self.free[link] = start + self.costs.time_on_link()
        self.departures += 1
        heappush(self.arrivals, (start + self.costs.hop(), self.departures, message))

    def _arrive(self, message: Message) -> None:
        self.arrived.add(message)
        if message in self.waiting:
            self._go_on(self.waiting.pop(message))

    def _post_receives(self, instr: Instr) -> None:
        for message in neighbours(self.schedule, instr)[0]:
            self.open.add(message)
            self._enter_mpi(message.target)

    def _enter_mpi(self, pp_rank: int) -> None:
        """Answer the messages that ask this rank, and send those that others have answered."""
        for message in [one for one in self.asking[pp_rank] if one in self.open]:
            self.asking[pp_rank].remove(message)
            if message.source in self.computing:
                self.answered[message.source].append(message)
            else:
                self._depart(message)
        for message in self.answered[pp_rank]:
            self._depart(message)
        self.answered[pp_rank] = []
