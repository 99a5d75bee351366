"""Which form on disk a model has: a module with `short_name`, `file_name`, `disk_shape`, `to_json`,
`settings` and `differences`.
"""

from __future__ import annotations

import json
from pathlib import Path

from mpipar import convnet_format, hf_format
from mpipar.errors import DataError

FORMATS = {"decoder": hf_format, "convnet": convnet_format}


def of(model):
    """The form of a ModelConfig's model."""
    return FORMATS[model.model]


def model_settings(folder: str) -> dict:
    """The ModelConfig fields that folder/config.json fixes; DataError when it can't be used."""
    path = Path(folder) / "config.json"
    where = f"--init-from {folder}"
    kind, shown = "decoder", "GPT-2"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("model_type") == convnet_format.MODEL_TYPE:
            kind = shown = "convnet"
        settings = FORMATS[kind].settings(found)
    except OSError as error:
        raise DataError(f"{where}: {path.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{where}: {path.name} is not a {shown} configuration: {error!r}") from None
    wrong = [f"{where}: {text}" for text in FORMATS[kind].differences(found)]
    if wrong:
        raise DataError(wrong)
    return {"model": kind} | settings
