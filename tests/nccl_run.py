"""mpipar over the stand-in for NCCL: python nccl_run.py RANK PLACE HOW mpipar-arguments...

Every rank has a GPU of its own. RANK, PLACE, HOW: what goes wrong, as for dying_run.py.
"""

import sys
import types

import dying_run

from mpipar.job import mpi

initialize = mpi.initialize


def with_stand_ins(library):
    """Start MPI, and put in the stand-ins: one plays the GPU, by MPI, in a thread of its own."""
    initialize(library)
    import fake_cupy
    import fake_nccl

    own = vars(fake_cupy.cuda.Device()) | {"pci_bus_id": f"0000:{fake_nccl.BOOT.rank:02X}:00.0"}
    fake_cupy.cuda.Device = lambda number=0: types.SimpleNamespace(**own)
    fake_cupy.cuda.nccl = fake_nccl
    sys.modules |= {"cupy": fake_cupy, "cupy.cuda.nccl": fake_nccl}


if __name__ == "__main__":
    mpi.initialize = with_stand_ins
    dying_run.main()
