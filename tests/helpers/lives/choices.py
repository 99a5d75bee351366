"""The choices of `train`, their values, and the settings that are not varied, with the reason.

None stands for a flag that is not typed. A case is a dict: name of a choice -> value. mpipar itself
decides what is legal together: there is no second list of rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpipar.config.sections import FIELDS
from mpipar.errors import UserError
from mpipar.ops import KERNELS
from mpipar.run.files.settings import ParsedConfig, over
from mpipar.run.resolve import resolve
from tests.helpers.lives.array import Case


def every(name: str) -> tuple:
    """Return the legal values of a setting."""
    return FIELDS[name].metadata["choices"]


def others(name: str) -> tuple:
    """Return None and all values of a setting but its default, which None stands for."""
    return (None, *(value for value in every(name) if value != FIELDS[name].default))


MOST_RANKS = 4
AXES = ("dp", "pp", "cp", "tp")
CHOICES = {
    "schedule": every("schedule"),
    # An axis of 3 or 4 leaves nothing to the others, so each axis has only one of the two.
    "dp": (1, 2, 3),
    "pp": (1, 2, 4),
    "cp": (1, 2, 3),
    "tp": (1, 2, 4),
    "num_microbatches": (1, 2, 4, 8),
    "chunks": (None, 1, 3),
    "stage_layers": (None, (3, 1), (0, 2, 2, 0)),
    "rank_order": (None, "tp,cp,dp,pp"),
    "islands": (None, 1, 2),
    "outer_interval": (None, 1, 2),
    "outer_lr": (None, 0.5),
    "outer_momentum": (None, 0.6),
    "cp_attention": others("cp_attention"),
    "arch": others("arch"),
    "norm": (None, *every("norm")),
    "activation": (None, *every("activation")),
    "positions": (None, *every("positions")),
    "rope_theta": (None, 100.0),
    "bias": (None, *every("bias")),
    "tied": (None, True, False),
    "kv_heads": (None, 4, 2),
    "ffn": (31, None),  # 31 is padded for every tp
    "vocab_size": (None, 259),
    "ffn_cut": others("ffn_cut"),
    "experts": (None, 4),
    "experts_per_token": (None, 1, 3),
    "expert_ffn": (None, 13),
    "shared_expert_ffn": (None, 11),
    "router_balance": others("router_balance"),
    "ep": (None, 2),
    "sequence_parallel": (None, True),
    "tp_matmul": others("tp_matmul"),
    "recompute": others("recompute"),
    "zero": every("zero"),
    "reshard_after_forward": others("reshard_after_forward"),
    "dtype": ("float64", *(name for name in every("dtype") if name != "float64")),
    "loss_scale": (None, 1024.0),
    "kernels": (None, *KERNELS["cpu"]),
    "optimizer": others("optimizer"),
    "lr_schedule": others("lr_schedule"),
    "min_lr_ratio": (None, 0.3),
    "warmup_steps": (0, 2),
    "weight_decay": (None, 0.0),
    "beta1": (None, 0.8),
    "beta2": (None, 0.99),
    "clip": (None, 0.0, 0.1),
    "bucket_bytes": (None, 20_000),
    "seed": (None, 5),
    "init_from": ("WEIGHTS", None),  # a folder that is made for the case
    "resume": ("RUN", "auto"),  # into a new folder from the run's, or in the run's own
    "save_interval": (None, 1, 2),
    "save_async": (None, True),
    "keep_checkpoints": (None, 1, 0),
    "log_interval": (None, 1),
    "eval_interval": (None, 1),
    "eval_tokens": (None, 50),
    "sample_tokens": (3, None, 0),
    "check_comm": (None, True),
    "all_reduce": others("all_reduce"),
    "check_replicas": (None, 1, 0),
    "trace": (None, "2:3"),
    "memory_limit": (None, 1 << 30),
}
# What every case has: a small model with odd sizes, and an update that hides no error.
STEPS, LATER = 3, 4  # of a run, and of the one that resumes it
BASE = {
    "layers": 4,
    "d_model": 24,
    "heads": 12,
    "seq_len": 12,
    "batch_size": 24,
    "steps": STEPS,
    "hang_warn": 0.0,
    "hang_stop": 0.0,
}
BASE_OF = {
    # Near a gradient of zero AdamW would turn a rounding error into a whole step.
    ("optimizer", None): {"lr": 0.01, "eps": 1e-3},
    ("optimizer", "sgd"): {"lr": 0.5},
    ("optimizer", "muon"): {"lr": 0.01, "eps": 1e-3},
}
OUTSIDE = {  # settings that no case has
    "preset": "sets values of other settings",
    "data": "every case reads one text",
    "val_data": "is read as --data is",
    "out": "names a folder",
    "device": "cuda needs a GPU",
    "gemm": "is for a GPU",
    "schedule_csv": "loads a schedule that has a name here",
    "tensorboard": "needs an extra, and writes what metrics.jsonl has",
    "norm_eps": "is a number in one formula",
    **dict.fromkeys(
        ("head_dim", "rope_scaling", "max_positions", "expert_interval", "router_loss_coef"),
        "has no flag; tests/helpers/drawn.py and test_experts.py have it",
    ),
}


def small_choices() -> dict:
    """Return the choices of exact cases on at most two ranks, without kernels to be compiled."""
    return (
        CHOICES
        | dict.fromkeys(AXES, (1, 2))
        | {
            "num_microbatches": (1, 2, 4),
            "stage_layers": (None, (3, 1)),
            "kernels": (None, "numpy"),
            "dtype": ("float64",),
            "loss_scale": (None,),
        }
    )


def ranks_of(case: Case) -> int:
    """Return the number of ranks that a case runs on."""
    return math.prod(case.get(axis, 1) for axis in AXES)


def settings_of(case: Case) -> dict:
    """Return the values that a case types, by field, except those that name a folder."""
    typed = {**BASE, **case}
    for (choice, value), settings in BASE_OF.items():
        if case.get(choice) == value:
            typed |= settings
    return {
        name: value
        for name, value in typed.items()
        if value is not None and name not in ("init_from", "resume", "number")
    }


def refusals(case: Case, most_ranks: int = MOST_RANKS) -> list[str]:
    """Return mpipar's objections to a case, which may lack choices; empty if it is legal."""
    reading = over({}, ParsedConfig(None, given=settings_of(case)))
    ranks = ranks_of(case)
    wrong = (
        [f"ranks: {ranks} are more than the {most_ranks} of a session"]
        if ranks > most_ranks
        else []
    )
    try:
        resolve(reading, ranks)
    except UserError as error:
        wrong += error.problems
    return wrong


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as a user types them."""
    found = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found += [
                flag,
                ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
                if isinstance(value, tuple)
                else str(value),
            ]
    return found
