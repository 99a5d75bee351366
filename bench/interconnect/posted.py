"""Operations that are posted first and waited for later, so that other work can go on."""

from __future__ import annotations

from functools import partial

from bench.interconnect.cases import BARE, COMM, NAME, AllReduce, Case


class Posted(Case):
    """Base of these cases: `post` starts one and returns what is pending."""

    def post(self) -> list:
        raise AssertionError("each case posts its own")

    def run(self):
        self.wait_all(self.post())


class PostedAllReduce(Posted, AllReduce):
    """A posted all-reduce, as training uses it to sum gradients."""

    name, wide = "iall-reduce", True
    vias = (COMM, BARE)

    laid_out = Case.laid_out  # `post` has one call at a time

    def aim(self, call):
        self.start = call

    def through_comm(self, x, y):
        return partial(self.comm.iall_reduce, x, NAME)

    def bare(self, x, y):
        return partial(self.mpi.Iallreduce, self.mpi4py.IN_PLACE, x)

    def post(self):
        return [self.start()]
