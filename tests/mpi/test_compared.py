"""File digests on the ranks of a host: one reads, the others ask whether theirs is the same."""

import hashlib

import pytest
from small_model import WORLD

from mpipar.run import compared


class Host:
    """The session of ranks that are all on one host."""

    world, host_rank, host_ranks = WORLD, WORLD.rank, tuple(range(WORLD.size))

    @staticmethod
    def agree(function):
        return function()


@pytest.mark.ranks(2, 3)
def test_a_file_of_a_host_is_read_by_its_first_rank_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    reads, plain = [], compared.digest_of
    monkeypatch.setattr(
        compared, "digest_of", lambda file, where: reads.append(where) or plain(file, where)
    )
    shared = WORLD.bcast(tmp_path) / "shared"
    own = tmp_path / "own"
    own.write_bytes(b"of rank 1" if WORLD.rank == 1 else b"of all")
    if WORLD.rank == 0:
        shared.write_bytes(b"x" * 99)
    WORLD.Barrier()
    with open(shared, "rb") as one, open(own, "rb") as other:
        found = compared.digests_on_host(Host, {"shared": one, "own": other})
    assert reads == ([str(shared), str(own)] if WORLD.rank == 0 else [str(own)])
    assert found["shared"] == hashlib.sha256(b"x" * 99).hexdigest()
    everybody = WORLD.allgather(found["own"])
    assert [one == everybody[0] for one in everybody] == [rank != 1 for rank in range(WORLD.size)]
