"""Which form on disk a model has.

A form is a module with `short_name`, `file_name`, `disk_shape`, `to_json`, `settings` and
`differences`.
"""

from __future__ import annotations

import json
from pathlib import Path

from mpipar.checkpoint import hf_gpt2 as hf_format
from mpipar.checkpoint import own as own_format
from mpipar.errors import DataError


def format_of(model):
    """The form of a ModelConfig's model: Hugging Face's if that can describe it, or mpipar's."""
    return hf_format if (model.model, model.norm) == ("decoder", "layer") else own_format


def model_settings(folder: str) -> dict:
    """The ModelConfig fields that folder/config.json fixes.

    Raises DataError if it cannot be used.
    """
    path = Path(folder) / "config.json"
    where = f"--init-from {folder}"
    form, shown = hf_format, "GPT-2"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if str(found.get("model_type")).startswith(own_format.PREFIX):
            form, shown = own_format, found["model_type"]
        settings = form.settings(found)
    except OSError as error:
        inside = Path(folder) / "weights"
        cure = f"; give {inside}" if (inside / path.name).exists() else ""
        raise DataError(f"{where}: {path.name}: {error.strerror}{cure}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{where}: {path.name} is not a {shown} configuration: {error!r}") from None
    wrong = [f"{where}: {text}" for text in form.differences(found)]
    if wrong:
        raise DataError(wrong)
    return settings
