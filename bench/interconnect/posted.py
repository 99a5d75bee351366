"""Operations that are posted first and waited for later, so that other work can go on."""

from __future__ import annotations

from bench.interconnect.cases import NAME, AllReduce, Case


class Posted(Case):
    """Base of these cases: `post` starts one and returns what is pending."""

    def post(self) -> list:
        raise AssertionError("each case posts its own")

    def run(self):
        for one in self.post():
            self.wait(one)


class PostedAllReduce(Posted, AllReduce):
    """A posted all-reduce, as training uses it to sum gradients."""

    name = "iall-reduce"

    def through_comm(self):
        return self.comm.iall_reduce(self.x, NAME)

    def bare(self):
        return self.mpi.Iallreduce(self.in_place_marker, self.x)

    def post(self):
        self.result = self.x
        return [self.call()]
