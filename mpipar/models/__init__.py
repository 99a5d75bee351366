"""Models as sequences of layers, cut into the stages that a pipeline runs.

A model is a module with `Stage`, `unit_flops`, `describe_model`, `ENTRY` and `CUT`; what it reads
is in mpipar/data, its form on disk in mpipar/checkpoint.
"""

from mpipar.models import convnet, decoder
from mpipar.models.stage import balanced_layers

MODELS = {"decoder": decoder, "convnet": convnet}


def model_of(config):
    """The module of a ModelConfig's model."""
    return MODELS[config.model]


def layer_split(config, schedule) -> tuple[int, ...]:
    """Number of blocks of each stage: --stage-layers, or balanced over the schedule's ranks."""
    flops = model_of(config.model).unit_flops(config.model)
    return config.grid.stage_layers or balanced_layers(
        config.model.layers, flops, schedule.stages_by_rank)
