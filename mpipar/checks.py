"""The checks of a completed configuration by the floors above plain data, for complete()/resolve().

Each takes the Config and raises UserError with all it finds, so that one run of the command names
the mistakes of all floors at once.
"""

from mpipar.config import Config
from mpipar.data.rows import split
from mpipar.data.source import load_tokens
from mpipar.errors import UsageError
from mpipar.pipeline import schedules


def check_stages(config: Config) -> None:
    """The schedule exists and takes these counts, and its stages can be filled with blocks."""
    grid, layers = config.grid, config.model.layers
    found = schedules.problems(grid.schedule, grid.pp, grid.num_microbatches, grid.chunks)
    if found:
        raise UsageError(found)
    stages = schedules.num_stages(grid.schedule, grid.pp, grid.chunks)
    if stages > layers >= grid.pp:
        found.append(f"--layers {layers}: --schedule {grid.schedule} cuts the model into {stages} "
                     f"stages of at least one block; use --layers {stages} or a smaller --pp")
    if grid.stage_layers is not None and len(grid.stage_layers) != stages:
        found.append(f"--stage-layers {','.join(map(str, grid.stage_layers))}: names "
                     f"{len(grid.stage_layers)} stages, but pp {grid.pp} with --schedule "
                     f"{grid.schedule} has {stages}")
    if found:
        raise UsageError(found)


def check_data(config: Config) -> None:
    """The data is there, fits the vocabulary, and fills a batch to train on and one to hold out."""
    tokens, _ = load_tokens(config.run.data, config.model.vocab_size)
    split(tokens, config.train.batch_size, config.model.seq_len)


CHECKS = (check_stages, check_data)
