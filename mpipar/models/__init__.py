"""Models as sequences of layers, cut into the stages that a pipeline runs.

A model is a module with `Stage`, `balanced_layers`, `flops`, `describe`, `ENTRY` and `CUT`; what it
reads is in mpipar/data, its form on disk in mpipar/formats.
"""

from mpipar.models import convnet, decoder

MODELS = {"decoder": decoder, "convnet": convnet}


def of(config):
    """The module of a ModelConfig's model."""
    return MODELS[config.model]
