"""Hugging Face's format of Mixtral: that of Mistral, with a router and experts in each block.

In the files an expert has three matrices: w1 is the gate, w3 the up-projection and w2 the
down-projection. In memory transformers 5 stores those of all experts together; it writes them
separately, as version 4 does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpipar.run.checkpoint.hf_form import number
from mpipar.run.checkpoint.hf_llama import MISTRAL, RopeForm

EXPERT = {"moe.up.w": ("w1", "w3"), "moe.down.w": ("w2",)}  # in the order of the parameter
COEF = "router_aux_loss_coef"


@dataclass(frozen=True)
class MixtralForm(RopeForm):
    """See `mpipar.run.checkpoint.formats` for what a format is."""

    def tensors(self, param) -> dict[str, tuple[int, ...]]:
        """Return those of all experts, one after another, and otherwise as in Mistral's files."""
        block, _, layer = param.name.partition(".")
        if layer not in EXPERT:
            return super().tensors(param)
        start = f"{self.PREFIX}layers.{block.removeprefix('block')}.block_sparse_moe.experts"
        return {
            f"{start}.{expert}.{name}.weight": param.shape[-2:]
            for expert in range(param.shape[0])
            for name in EXPERT[layer]
        }

    def describes(self, model) -> bool:
        """Return whether config.json can say what a ModelConfig computes."""
        return (
            super().describes(model)
            and model.experts is not None
            and model.router_balance != "bias"
        )

    def to_json(self, model, dtype: str) -> dict:
        """Return the config.json of a resolved ModelConfig whose weights are written as `dtype`."""
        coef = model.router_loss_coef if model.router_balance == "loss" else 0.0
        return super().to_json(model, dtype) | {COEF: coef}

    def settings(self, found: dict) -> dict:
        """Return the ModelConfig fields that a config.json fixes; raise TypeError."""
        coef = number(COEF, (self.missing | found)[COEF])
        balance = {"router_balance": "loss", "router_loss_coef": coef}
        return super().settings(found) | (balance if coef else {"router_balance": "none"})


MIXTRAL = MixtralForm(
    **vars(MISTRAL)
    | {
        "kind": "mixtral",
        "architecture": "MixtralForCausalLM",
        "names": MISTRAL.names | {"moe.router": "block_sparse_moe.gate"},
        "numbers": MISTRAL.numbers
        | {
            "expert_ffn": "intermediate_size",
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
        },
        "always": {
            "norm": "rms",
            "activation": "swiglu",
            "positions": "rope",
            "expert_interval": 1,
            "shared_expert_ffn": None,
        },
        "missing": MISTRAL.missing | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, COEF: 0.001},
        "COMPUTED": MISTRAL.COMPUTED | {"router_jitter_noise": (0.0, None)},
        "ALIASES": {"num_experts": "num_local_experts"},
        "window": lambda found: found.get("sliding_window"),
    }
)
