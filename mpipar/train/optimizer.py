"""The optimizer of a rank: which rule updates which parameters.

A row of OPTIMIZERS names two rules: that of single numbers, and that of the hidden matrices. A
Param says which of both it is, or that it needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpipar.comm.groups import Comms
from mpipar.config.train import TrainConfig
from mpipar.layers.flat import FlatParams
from mpipar.layers.param import Param
from mpipar.ops.functions import Ops
from mpipar.train.muon import Muon
from mpipar.train.optim import AdamW, Sgd, Signs

RULES: dict[str, type[Sgd]] = {"sgd": Sgd, "adamw": AdamW, "muon": Muon, "signs": Signs}
OPTIMIZERS = {  # by --optimizer
    "sgd": ("sgd", "sgd"),
    "adamw": ("adamw", "adamw"),
    "muon": ("adamw", "muon"),
}


def rules_of(optimizer: str) -> dict[str, str]:
    """Return {rule of a Param: the rule of this optimizer that updates it}."""
    numbers, matrices = OPTIMIZERS[optimizer]
    return {"numbers": numbers, "matrices": matrices, "signs": "signs"}


class Optimizer:
    """Updates all parameters of a rank, each flat buffer by its rule.

    flats: all FlatParams of the rank; each rule adds its moments to its own.
    """

    def __init__(self, ops: Ops, flats: Sequence[FlatParams], config: TrainConfig, comms: Comms):
        self.name, self.flats = config.optimizer, flats
        self.rules = {
            name: RULES[name](ops, [flat for flat in flats if flat.rule == name], config, comms)
            for name in dict.fromkeys(rules_of(self.name).values())
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all moments."""
        return tuple(dict.fromkeys(kind for rule in self.rules.values() for kind in rule.kinds))

    def kinds_of(self, param: Param) -> tuple[str, ...]:
        """Return the kinds of state that an update of a parameter reads and changes."""
        return ("master", *RULES[rules_of(self.name)[param.rule]].kinds)

    def step(self, lr: float, step: int) -> None:
        """Update all parameters of this rank; step counts from 1.

        Comm: that of the rules; with ZeRO 1, one all_gather for each segment.
        """
        pending = []
        for rule in self.rules.values():
            rule.prepare()
        for flat in self.flats:
            for number in range(len(flat.decay_runs)):
                self.rules[flat.rule].update(flat, number, lr, step)
                pending += flat.updated(number)
        for one in pending:
            one.wait()
