"""Facts about everything that determines a job's numbers; all ranks compare them before a run.

Hosts may hold different copies of a file: of data, weights, a tokenizer, a schedule, or prompts.
Ranks that start from them would train another model than intended, so every byte is compared. One
process per host reads a large file on behalf of all that have the same one there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from mpipar.checkpoint.manifest import GONE, NAME
from mpipar.checkpoint.weight_files import check_digests
from mpipar.comm.facts import all_gather_facts
from mpipar.config.sections import Config, in_force
from mpipar.config.setting import flag
from mpipar.data.fingerprint import fingerprint
from mpipar.data.token_file import pieces_of
from mpipar.errors import DataError
from mpipar.files.bounded import open_regular, problems_as
from mpipar.files.digests import digest_of, state_of
from mpipar.run.source import source_files


def compare_inputs(session, inputs) -> tuple[dict, str]:
    """Return the data's fingerprint and the digest of the first weights (or "") if all ranks agree.

    Otherwise all ranks leave together.
    Comm: that of `digests_on_host` and of `Session.compare`.
    """
    config = inputs.config
    arrays = [inputs.train_part, inputs.held_out]
    pieces = {piece.file.name: piece for piece in pieces_of(arrays)}
    files = {name: piece.file for name, piece in pieces.items()}
    read = {state_of(piece.file): piece.sha256 for piece in pieces.values() if piece.sha256}
    digests = digests_on_host(session, files, read)
    found = session.agree(lambda: fingerprint(arrays, digests))
    facts = config_facts(session, config, inputs.tokenizer)
    session.compare(
        facts
        | {"data": " ".join(map(str, found.values())), "prompt": digest_of_value(inputs.prompt)}
    )
    return found, facts.get("weights", "")


def config_facts(session, config: Config, tokenizer) -> dict[str, str]:
    """Return facts of a complete Config: its values, and the files that it names except the data.

    Comm: that of `digests_on_host`.
    """
    facts = {flag(name): str(value) for name, value in in_force(config).items()}
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer.digest
    if config.grid.schedule_csv is not None:
        facts["schedule"] = _digest_of_files(session, lambda: [Path(config.grid.schedule_csv)])
    if config.run.init_from is not None:
        facts["weights"] = _digest_of_files(
            session,
            lambda: source_files(config.run.init_from),
            lambda found: check_digests(Path(config.run.init_from), found),
        )
    return facts


def digest_of_weights(folder: str) -> str:
    """Return the SHA-256 of all bytes of a folder's weights, or of a checkpoint's manifest."""
    with ExitStack() as stack:
        files = _opened(source_files(folder), stack)
        return digest_of_value({name: digest_of(file, file.name) for name, file in files.items()})


def _digest_of_files(
    session,
    paths: Callable[[], Iterable[Path]],
    check: Callable[[dict[str, str]], None] = lambda found: None,
) -> str:
    """Return a SHA-256 over those of the files.

    check({name: SHA-256}): raises DataError if one of them is damaged.
    Comm: two agreements, that of `digests_on_host`.
    """
    with ExitStack() as stack:
        files = session.agree(lambda: _opened(paths(), stack))
        found = digests_on_host(session, files)
        session.agree(lambda: check(found))
        return digest_of_value(found)


def _opened(paths: Iterable[Path], stack: ExitStack) -> dict[str, BinaryIO]:
    """Return {name: file} of regular files, which the stack closes. Raises DataError."""
    found = {}
    for path in paths:
        with problems_as(DataError, str(path), GONE if path.name == NAME else ""):
            found[path.name] = stack.enter_context(open_regular(path))
    return found


def digest_of_value(value) -> str:
    """Return the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digests_on_host(
    session, files: Mapping[str, BinaryIO], read: Mapping[str, str] = {}
) -> dict[str, str]:
    """Return {name: SHA-256} of open files, over every byte of them.

    The first rank of each host reads them. The others rely on its result for each file that is the
    same in the same state, and read any other. read: {state: SHA-256} of files already read.
    Comm: one agreement; with several ranks another one, and two small all-gathers.
    """

    def those(known: Mapping[str, str]) -> dict[str, str]:
        return {
            name: known.get(state_of(file)) or digest_of(file, file.name)
            for name, file in files.items()
        }

    first = session.host_rank == 0
    found = session.agree(lambda: those(read) if first else {})
    if session.world.size > 1:
        known = {state_of(files[name]): digest for name, digest in found.items()}
        everybody = all_gather_facts(session.world, known)
        found = session.agree(lambda: those(everybody[session.host_ranks[0]]))
    return found
