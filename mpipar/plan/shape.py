"""A decoder as the planner sees it: its sizes, its parameters, and its FLOPs.

Letters: D width of the stream, F of the feed-forward network, V vocabulary, T tokens of a row.
There are a heads of queries and k of keys and values, each of width h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from mpipar.config.model import ModelConfig
from mpipar.layers.costs import Cost, Letters, value
from mpipar.layers.ffn import FFNS
from mpipar.models.decoder import unit_costs
from mpipar.models.stage import UnitCosts

# Settings of the kinds of blocks: one network, experts, and experts beside a network.
BLOCKS = {"dense": {}, "experts": {"experts": 2}, "shared": {"experts": 2, "shared_expert_ffn": 1}}
# {(kind of block, activation, whether tokens are cut over tp, whether scores are stored): costs of
# units}. A rank's tokens of cp travel round a ring.
COSTS = {
    (kind, activation, parallel, scores): unit_costs(
        ModelConfig(layers=1, activation=activation, sequence_parallel=parallel, **BLOCKS[kind]),
        "ring",
        scores,
    )
    for kind, activation, parallel, scores in product(BLOCKS, FFNS, (False, True), (False, True))
}
MFU_RULES = {
    "model": "3 x forward of all products and of attention over the whole square; the head once",
    "causal": "attention over the half of the square that a token may see",
    "hardware": "and the forward passes that run again",
    "embedding": "and a product with the input embedding, as if its look-up were one",
    "whole-heads": "keys and values as wide as queries, whatever the model has",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. positions: rows of a learned table of positions, 0 without one.

    experts: of every expert_interval-th block, each of width expert_ffn; a token passes
    experts_per_token of them, and a network of width shared_ffn if there is one.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokens: int
    activation: str = "gelu"
    tied: bool = True
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    expert_interval: int = 1

    @classmethod
    def of(cls, model: ModelConfig) -> Shape:
        """Return the Shape of a resolved ModelConfig."""
        return cls(
            model.layers,
            model.d_model,
            model.ffn,
            model.heads,
            model.kv_heads or model.heads,
            model.head_dim or model.d_model // model.heads,
            model.vocab_size,
            model.seq_len,
            model.activation,
            model.tied,
            model.longest_row if model.positions == "learned" else 0,
            model.experts or 0,
            model.experts_per_token,
            model.expert_ffn or 0,
            model.shared_expert_ffn or 0,
            model.expert_interval,
        )

    def costs(self, parallel: bool = False, scores: bool = False, kind: str = "dense") -> UnitCosts:
        """Return the costs of the units: a row of COSTS. An activation without a gate counts as
        GELU.
        """
        activation = self.activation if self.activation in FFNS else "gelu"
        return COSTS[kind, activation, parallel, scores]

    def blocks(self, parallel: bool = False, scores: bool = False) -> list[tuple[float, Cost]]:
        """Return (share of the blocks, Cost) of each kind of block."""
        dense = self.costs(parallel, scores).block
        if not self.experts:
            return [(1.0, dense)]
        share = self.layers // self.expert_interval / self.layers
        several = self.costs(parallel, scores, "shared" if self.shared_ffn else "experts").block
        return [(share, several), (1 - share, dense)] if share < 1 else [(1.0, several)]

    def mean(
        self, part: str, sizes: Letters, parallel: bool = False, scores: bool = False
    ) -> float:
        """Return a Sum of the blocks' Cost by its field, averaged over all blocks."""
        return sum(
            share * value(getattr(cost, part), sizes)
            for share, cost in self.blocks(parallel, scores)
        )

    def letters(
        self, rows: float = 1, tp: int = 1, cp: int = 1, number: float = 1, ep: int = 1
    ) -> Letters:
        """Return the sizes of a rank for `costs`, without padding to whole numbers.

        rows: of a microbatch. number: bytes of one. Statistics of norms are neglected.
        """
        tokens = self.tokens / cp
        found = {
            "B": rows,
            "T": tokens,
            "t": tokens / tp,
            "A": self.tokens,
            "D": self.width,
            "f": self.ffn / tp,
            "v": self.vocab / tp,
            "Q": self.heads * self.head_dim / tp,
            "K": self.kv_heads * self.head_dim / tp,
            "h": self.heads / tp,
            "e": number,
            "s": 0,
        }
        if self.experts:
            found |= {
                "E": self.experts,
                "x": self.experts / ep,
                "k": self.experts_per_token,
                "g": self.expert_ffn / tp,
                "W": self.shared_ffn,
                "w": self.shared_ffn / tp,
                "i": 8,
            }
        return found

    def _weights(self, experts: int) -> float:
        """Return the weights of a block's products with `experts` experts, averaged over blocks."""
        return self.mean("weights", self.letters() | {"x": experts})

    @cached_property
    def dense_parameters(self) -> float:
        """Weights of the products of a block, without its experts."""
        return self._weights(0)

    @cached_property
    def expert_parameters(self) -> float:
        """Weights of the experts of a block."""
        return self.block_parameters - self.dense_parameters if self.experts else 0.0

    @cached_property
    def block_parameters(self) -> float:
        """Weights of the products of a block; biases and norms are less than a thousandth."""
        return self._weights(self.experts)

    @cached_property
    def passed_parameters(self) -> float:
        """Weights of the products of a block that a token passes, of its own experts only."""
        return self._weights(self.experts_per_token)

    @property
    def table_parameters(self) -> int:
        """Weights of the token table, and of the head if it has its own."""
        return self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.block_parameters + self.table_parameters

    def step_flops(self, rows: int, rule: str = "model", recompute: str = "none") -> float:
        """Return the FLOPs of a step over `rows` rows by one of MFU_RULES.

        A product of a token with n weights takes 2n FLOPs forward and 4n backward. Scores and
        values of a token take 4Tah forward over the whole square. Source: arXiv 2104.04473
        appendix, extended to grouped heads and gates.
        """
        products, sizes = 2 * self.passed_parameters, self.letters() | {"T": 1}
        if rule == "whole-heads":
            products += 4 * self.width * (self.heads - self.kv_heads) * self.head_dim
        attention = self.mean("attention", sizes) * (0.5 if rule == "causal" else 1)
        head = 2 * self.vocab * self.width * (2 if rule == "embedding" else 1)
        again = {"none": 0, "attention": attention, "block": products + attention}[recompute]
        forwards = 3 * (products + attention) + (again if rule == "hardware" else 0)
        return rows * self.tokens * (self.layers * forwards + 3 * head)


def utilization(flops: float, seconds: float, devices: int, peak_tflops: float) -> float:
    """Return the share of the devices' peak that a step's FLOPs amount to (MFU)."""
    return flops / (seconds * devices * peak_tflops * 1e12)
