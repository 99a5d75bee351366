"""File digests on the ranks of a host: all get those of their own files."""

import hashlib

import pytest
from small_model import WORLD

from mpipar.run import compared


class Host:
    """The session of ranks that are all on one host."""

    host_rank = WORLD.rank

    @staticmethod
    def agree(function):
        found = function()
        WORLD.Barrier()
        return found


@pytest.mark.ranks(2, 3)
def test_every_rank_has_the_digest_of_its_own_file(tmp_path):
    path, content = tmp_path / "own", b"of rank 1" if WORLD.rank == 1 else b"of all"
    path.write_bytes(content)
    with open(path, "rb") as file:
        found = compared.digests_on_host(Host, {"own": file})
    assert found == {"own": hashlib.sha256(content).hexdigest()}
