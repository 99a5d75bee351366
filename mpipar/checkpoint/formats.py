"""Which form on disk a model has.

A form is a module with `short_name`, `file_name`, `disk_shape`, `to_json`, `settings` and
`differences`.
"""

from __future__ import annotations

import os
from pathlib import Path

from mpipar.checkpoint import hf_gpt2 as hf_format
from mpipar.checkpoint import own as own_format
from mpipar.config.sections import FIELDS
from mpipar.config.setting import value_problem
from mpipar.errors import DataError
from mpipar.files.bounded import read_json
from mpipar.files.text import brief, shown


def format_of(model):
    """The form of a ModelConfig's model: Hugging Face's if that can describe it, or mpipar's."""
    return hf_format if (model.model, model.norm) == ("decoder", "layer") else own_format


def model_settings(folder: str) -> dict:
    """The ModelConfig fields that folder/config.json fixes.

    Raises DataError if it cannot be used.
    """
    path, inside = Path(folder) / "config.json", Path(folder) / "weights"
    where = f"--init-from {folder}"
    cure = f"give {inside}" if os.path.exists(inside / path.name) else ""
    found = read_json(path, where=f"{where}: {path.name}", cure=cure)
    form, kind = hf_format, "GPT-2"
    try:
        if str(found.get("model_type")).startswith(own_format.PREFIX):
            form, kind = own_format, shown(found["model_type"])
        settings = form.settings(found)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{where}: {path.name} is not a {kind} configuration: {brief(what)}") from None
    wrong = [f"{where}: {path.name}: {text}" for text in (
        *form.differences(found), *_out_of_bounds(settings))]
    if wrong:
        raise DataError(wrong)
    return settings


def _out_of_bounds(settings: dict) -> list[str]:
    """What is wrong with sizes that are too large, before anything is made of them."""
    found = [value_problem(name, FIELDS[name].metadata, one) for name, value in settings.items()
             for one in (value if isinstance(value, tuple) else (value,))
             if type(one) is int]
    return [text.removeprefix("--") for text in found if text]
