"""Facts about everything that determines a job's numbers; all ranks compare them before a run.

Hosts may hold different copies of a file: of data, weights, a tokenizer, a schedule, or prompts.
Ranks that start from them would train another model than intended, so every byte is compared. One
process per host reads a large file on behalf of all that have the same one there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from mpipar.config.sections import Config, in_force
from mpipar.config.setting import flag
from mpipar.errors import DataError
from mpipar.run.checkpoint.weight_files import check_digests
from mpipar.run.data.token_file import fingerprint, pieces_of
from mpipar.run.files.bounded import open_regular, problems_as
from mpipar.run.files.digests import digest_of
from mpipar.run.folder import source_files


def compare_inputs(session, inputs, checkpoint: str = "") -> tuple[dict, str]:
    """Return the data's fingerprint, and the digest of the checkpoint or else of the first weights.

    That is "" if there are none of either. Unless all ranks have the same, they leave together.
    Comm: that of `digests_on_host` and of `Session.compare`.
    """
    arrays = [inputs.train_part, inputs.held_out]
    files = {piece.file.name: piece.file for piece in pieces_of(arrays)}
    digests = digests_on_host(session, files)
    found = session.agree(lambda: fingerprint(arrays, digests))
    facts = config_facts(session, inputs.config, inputs.tokenizer)
    if checkpoint:
        facts["checkpoint"] = session.agree(lambda: digest_of_weights(checkpoint))
    data = " ".join(map(str, found.values()))
    session.compare(facts | {"data": data, "prompt": digest_of_value(inputs.prompt)})
    return found, facts.get("checkpoint") or facts.get("weights", "")


def config_facts(session, config: Config, tokenizer) -> dict[str, str]:
    """Return facts of a complete Config: its values, and the files that it names except the data.

    Raises DataError if the weights are damaged. Comm: agreements, that of `digests_on_host`.
    """
    facts = {flag(name): str(value) for name, value in in_force(config).items()}
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer.digest
    csv, weights = config.grid.schedule_csv, config.run.init_from
    for fact, given, paths in (
        ("schedule", csv, lambda: [Path(csv)]),
        ("weights", weights, lambda: source_files(weights)),
    ):
        if given is not None:
            with ExitStack() as stack:
                files = session.agree(lambda paths=paths, stack=stack: _opened(paths(), stack))
                found = digests_on_host(session, files)
            if fact == "weights":
                session.agree(lambda found=found: check_digests(Path(weights), found))
            facts[fact] = digest_of_value(found)
    return facts


def digest_of_weights(folder: str) -> str:
    """Return the SHA-256 of all bytes of a folder's weights, or of a checkpoint's manifest."""
    with ExitStack() as stack:
        return digest_of_value(_digests(_opened(source_files(folder), stack)))


def _opened(paths: Iterable[Path], stack: ExitStack) -> dict[str, BinaryIO]:
    """Return {name: file} of regular files, which the stack closes. Raises DataError."""
    found = {}
    for path in paths:
        with problems_as(DataError, str(path)):
            found[path.name] = stack.enter_context(open_regular(path))
    return found


def digest_of_value(value) -> str:
    """Return the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digests_on_host(session, files: Mapping[str, BinaryIO]) -> dict[str, str]:
    """Return {name: SHA-256} of open files, over every byte of them.

    The first rank of each host reads them, so that the others find the digests in the user's cache.
    Comm: two agreements.
    """
    own = session.agree(lambda: _digests(files) if session.host_rank == 0 else {})
    return session.agree(lambda: own or _digests(files))


def _digests(files: Mapping[str, BinaryIO]) -> dict[str, str]:
    return {name: digest_of(file, file.name) for name, file in files.items()}
