"""Mixture of experts: a router sends each token through some of many feed-forward networks.

    y = sum over the chosen e of p_e expert_e(x);   p = softmax over the chosen logits x w^T

The experts, stored side by side in two tensors, are distributed over the ranks of the group
`expert`. Rows of tokens travel to their experts and back (see parallel/expert_dispatch.py), which
takes two barriers forward and two backward, and a small one for each. tp cuts every expert as it
cuts a dense network: each of its ranks routes all tokens in the same way and computes only a part
of each expert's result. One sum over tp therefore follows the experts, forward and backward; it
also adds up the gradients that pass through the router. W crosses no barrier. Experts have no
biases. Sources: Shazeer et al., arXiv 1701.06538; Lepikhin et al., arXiv 2006.16668; Jiang et al.
(Mixtral), arXiv 2401.04088.

Letters: B batch, T tokens, N = B*T, D model width, E experts, K of them for each token, F the width
inside an expert, R the number of rows that this rank's experts get.
"""

from __future__ import annotations

from mpipar.config.model import ModelConfig
from mpipar.layers.context import Context
from mpipar.layers.parallel.expert_dispatch import Choice, ExpertDispatch, Plan
from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class Router:
    """Chooses K of E experts for each token, and balances their load as --router-balance says.

    none: no balancing. loss: each row of data has an additional loss, coef * E sum_e f_e P_e, where
    f_e is the fraction of the row's choices that fell on e, and P_e the mean of its softmax. A row
    is in one microbatch of one replica, so this loss is the same on every layout; a loss per
    microbatch would not be. Under cp, one all_reduce adds up the choices of a row. bias: the choice
    adds one number per expert to the softmax. After a step it falls where an expert had more tokens
    than the mean, and rises where it had fewer (arXiv 2408.15664).

    config: a completed ModelConfig.
    """

    def __init__(self, context: Context, name: str, config: ModelConfig, std: float) -> None:
        assert config.experts, "completed"
        self.ops, self.name, self.config, self.experts = context.ops, name, config, config.experts
        self.cp, self.factor = context.comms["cp"], context.factor
        # What a choice adds to coef * E f_e. The ranks of tp make the same choices, and the sum
        # over them comes later.
        self.part = (
            config.router_loss_coef
            * self.experts
            / (config.experts_per_token * config.seq_len * context.tp.size)
        )
        # Each rank of tp computes the gradients of its own part of the experts.
        self.w = Param(
            context, f"{name}.w", (self.experts, config.d_model), std=std, partial_groups=("tp",)
        )
        self.bias = None
        if config.router_balance == "bias":
            self.bias = Param(
                context, f"{name}.bias", (self.experts,), fill=0.0, decay=False, role="signs"
            )
        self.params = [self.w, *filter(None, [self.bias])]

    def forward(self, x: Array, stash: Stash) -> Choice:
        """Return the Choice for x (N, D)."""
        logits = self.ops.router_forward(x, self.w.data)
        choice = Choice(
            *self.ops.choice_forward(
                logits, self.config.experts_per_token, None if self.bias is None else self.bias.data
            )
        )
        stash[self.name, "x"], stash[self.name, "logits"] = x, logits
        stash[self.name, "choice"] = choice
        return choice

    def backward_input(self, dprobs: Array, stash: Stash) -> Array:
        """Return this rank's part of dx (N, D), from its part of dprobs (N, K).

        Comm: one all_reduce over cp if there is anything to balance.
        """
        choice, logits = stash.pop((self.name, "choice")), stash.pop((self.name, "logits"))
        dlogits = self.ops.choice_backward_input(dprobs, choice.probs, choice.ids, self.experts)
        rows = stash.batch.shape[0]
        loads = self.ops.expert_loads(choice.ids.reshape(rows, -1), self.experts)
        if self.config.router_balance == "loss":
            by_row = rows, -1, self.experts
            loads = self.ops.scale(self.cp.all_reduce(loads, f"{self.name}.loads"), self.part)
            self.ops.balance_backward_input(
                dlogits.reshape(by_row), logits.reshape(by_row), loads, self.factor.value
            )
        elif self.bias is not None:
            stash[self.name, "loads"] = loads
        stash[self.name, "dlogits"] = dlogits
        return self.ops.router_backward_input(dlogits, self.w.data)

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradient of the weights, and the loads that determine the next bias."""
        x, dlogits = stash.pop((self.name, "x")), stash.pop((self.name, "dlogits"))
        self.ops.router_backward_weight(dlogits, x, self.w.grad)
        if self.bias is not None:
            self.ops.add_excess(stash.pop((self.name, "loads")), self.bias.grad)


class MixtureOfExperts:
    """y = sum over the chosen experts e of p_e down_e(activation(up_e(x))).

    config: a completed ModelConfig. up holds (E, F, D), or (E, 2, F, D) for gate and up; down
    holds (E, D, F).
    """

    def __init__(
        self, context: Context, name: str, config: ModelConfig, *, std: float, out_std: float
    ) -> None:
        experts, width = config.experts, config.expert_ffn
        assert experts, "completed"
        assert width, "completed"
        self.ops, self.name, self.token_layout = context.ops, name, context.token_layout
        self.expert = context.comms["expert"]
        self.dispatch = ExpertDispatch(self.ops, self.expert, name, experts)
        self.gated = config.activation == "swiglu"
        wide = (2, width) if self.gated else (width,)
        self.router = Router(context, f"{name}.router", config, std)
        self.up = Param(
            context,
            f"{name}.up.w",
            (experts, *wide, config.d_model),
            std=std,
            placement={"expert": 0, "tp": len(wide)},
            axes="s" * len(wide) + "oi",
        )
        self.down = Param(
            context,
            f"{name}.down.w",
            (experts, config.d_model, width),
            std=out_std,
            placement={"expert": 0, "tp": 2},
            axes="soi",
        )
        self.params = [*self.router.params, self.up, self.down]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, D) of x (B, T, D).

        Comm: over expert the counts, the rows and the results; one all_reduce of y over tp.
        """
        plan, h = self._widen(x, stash)
        a = self.ops.swiglu_forward(h) if self.gated else self.ops.gelu_forward(h)
        rows = self.ops.grouped_matmul_nt(a, self.down.data, plan.counts)
        y = self.dispatch.combine(rows, plan, weighted=True)
        return self.token_layout.scatter(self._by_row(y, stash), f"{self.name}.down")

    def recompute(self, x: Array, stash: Stash) -> None:
        """Fill the stash as forward does. Comm: over expert the counts and the rows."""
        self._widen(x, stash)

    def _widen(self, x: Array, stash: Stash) -> tuple[Plan, Array]:
        """Return (plan, h (R, F), or (R, 2, F) of gate and up).

        Comm: over expert the counts and the rows.
        """
        x = self.token_layout.gather(x, stash.batch.shape[1], f"{self.name}.up")
        x = x.reshape(-1, x.shape[-1])
        choice = self.router.forward(x, stash)
        plan = self.dispatch.plan(choice)
        rows = self.dispatch.rows(x, plan)  # (R, D)
        h = self.ops.grouped_matmul_nt(rows, _matrices(self.up.data), plan.counts)
        if self.gated:
            h = h.reshape(len(h), 2, h.shape[1] // 2)  # there may be no row
        stash[self.name, "plan"], stash[self.name, "x"], stash[self.name, "h"] = plan, rows, h
        return plan, h

    def _by_row(self, x: Array, stash: Stash) -> Array:
        """Return the view (B, T, D) of x (N, D)."""
        return x.reshape(*stash.batch.shape, x.shape[-1])

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, D) of dy (B, T, D).

        The rows of dy are not weighted before they are sent. What the router learns about an expert
        is therefore the product of its da and its a, and no result has to be kept for it.
        Comm: over expert the rows of dy, their factors, the gradients of both; the router's; one
        all_reduce of dx over tp.
        """
        ops, dispatch, name = self.ops, self.dispatch, self.name
        plan, h = stash.pop((name, "plan")), stash.pop((name, "h"))
        dy = self.token_layout.gather(dy, stash.batch.shape[1], f"{name}.down")
        dy = dispatch.rows(dy.reshape(-1, dy.shape[-1]), plan)  # (R, D)
        factors = dispatch.factors(plan)
        da = ops.grouped_matmul(dy, self.down.data, plan.counts)
        if self.gated:
            dh, a = ops.swiglu_backward_input(da, h)
            dh = dh.reshape(len(dh), 2 * dh.shape[2])
        else:
            dh, a = ops.gelu_backward_input(da, h), ops.gelu_forward(h)
        dprobs = dispatch.factors_back(ops.row_dots(da, a), plan)
        dh, dy = ops.scale_rows(dh, factors), ops.scale_rows(dy, factors)
        rows = ops.grouped_matmul(dh, _matrices(self.up.data), plan.counts)
        dx = dispatch.combine(rows, plan, weighted=False)
        dx = ops.accumulate(dx, self.router.backward_input(dprobs, stash))
        stash[name, "dh"], stash[name, "a"], stash[name, "dy"] = dh, a, dy
        stash[name, "counts"] = plan.counts
        return self.token_layout.scatter(self._by_row(dx, stash), f"{name}.up")

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the router and of this rank's experts."""
        x, a, counts = (stash.pop((self.name, kind)) for kind in ("x", "a", "counts"))
        dh, dy = stash.pop((self.name, "dh")), stash.pop((self.name, "dy"))
        self.ops.grouped_matmul_tn_add(dh, x, _matrices(self.up.grad), counts)
        self.ops.grouped_matmul_tn_add(dy, a, self.down.grad, counts)
        self.router.backward_weight(stash)


def _matrices(w: Array) -> Array:
    """Return the view (E/q, F, D) or, of gate and up, (E/q, 2 F, D) of the first products."""
    return w.reshape(len(w), -1, w.shape[-1])
