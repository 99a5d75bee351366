"""The same decoder in PyTorch: the tests and the benchmarks compare with it.

Attention is explicit (product, mask, softmax, product), as mpipar computes it, or PyTorch's own
fused function. Products of Llama are those of its modules: one for each of q, k, v, gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from mpipar.ops.array_attention import rope_table
from mpipar.train.optim import learning_rate


def own_name(name: str) -> str:
    """Return the name that a weight has in a module."""
    return name.replace(".", "_")


class Part(torch.nn.Module):
    """Weights under the names of our parameters, in the type that the model computes in."""

    def __init__(self, config, weights: Mapping[str, torch.Tensor], dtype):
        super().__init__()
        self.model, self.dtype = config.model, dtype
        for name, w in weights.items():
            self.register_parameter(own_name(name), torch.nn.Parameter(w))

    def weight(self, name):
        """Return a weight in the model's type, the leaf itself if it has that type; or None."""
        w = getattr(self, own_name(name), None)
        return w if w is None else w.to(self.dtype)

    def linear(self, x, name):
        return functional.linear(x, self.weight(f"{name}.w"), self.weight(f"{name}.b"))

    def norm(self, x, name):
        w, eps = self.weight(f"{name}.w"), self.model.norm_eps
        if self.model.norm == "rms":
            return functional.rms_norm(x, w.shape, w, eps)
        return functional.layer_norm(x, w.shape, w, self.weight(f"{name}.b"), eps)


class Block(Part):
    """One block; fused: whether attention is PyTorch's own function."""

    def __init__(self, config, weights, dtype, fused: bool):
        super().__init__(config, weights, dtype)
        self.attend = self.fused if fused else self.explicit

    def forward(self, x, angles, hidden):
        q, k, v = self.heads(self.norm(x, "norm1"))
        heads = self.attend(turned(q, angles), turned(k, angles), v, hidden)
        x = x + self.linear(heads.transpose(1, 2).flatten(2), "attn.proj")
        return x + self.feed_forward(self.norm(x, "norm2"))

    def heads(self, x):
        """Return q (B, H, T, d), k and v (B, K, T, d) of x (B, T, D)."""
        if self.weight("attn.qkv.w") is None:
            parts = [self.linear(x, f"attn.{part}") for part in "qkv"]
        else:
            parts = self.linear(x, "attn.qkv").chunk(3, dim=-1)
        return [one.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2) for one in parts]

    def feed_forward(self, x):
        """Return the network's, or the experts', result for x (B, T, D)."""
        if self.weight("moe.router.w") is None:
            return self.linear(self.wide(x), "ffn.down")
        rows, count = x.flatten(0, 1), self.model.experts_per_token
        logits, ids = self.linear(rows, "moe.router").topk(count)
        order = ids.flatten().argsort(stable=True)
        ends = ids.flatten().bincount(minlength=self.model.experts).cumsum(0)
        gate, h = grouped(rows[order // count], self.weight("moe.up.w").flatten(1, 2), ends).chunk(
            2, dim=-1
        )
        y = grouped(functional.silu(gate) * h, self.weight("moe.down.w"), ends)
        y = y * torch.softmax(logits, dim=-1).flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // count, y).view_as(x)

    def wide(self, x):
        """Return the input of the block's last product."""
        h = self.linear(x, "ffn.up")
        if self.model.activation == "swiglu":
            return functional.silu(self.linear(x, "ffn.gate")) * h
        return functional.gelu(h, approximate="tanh")

    @staticmethod
    def explicit(q, k, v, hidden):
        """Compute attention in its parts; keys and values are repeated for queries sharing them."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        return torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1) @ v

    @staticmethod
    def fused(q, k, v, hidden):
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def grouped(x, w, ends):
    """Return x w[e]^T (R, M) of x (R, K) and w (E, M, K): ends (E,) of the rows of each expert."""
    if x.dtype != torch.float64:
        return functional.grouped_mm(x, w.transpose(1, 2), offs=ends.to(torch.int32))
    parts = x.tensor_split(ends[:-1].cpu())
    return torch.cat([part @ own.T for part, own in zip(parts, w, strict=True)])


def turned(x, angles):
    """Return x (B, H, T, d) rotated by its positions, as transformers does it."""
    if angles is None:
        return x
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Decoder(Part):
    """The whole model: blocks, and the weights at both of its ends."""

    def __init__(self, config, weights, dtype, fused: bool):
        ends = {name: w for name, w in weights.items() if not name.startswith("block")}
        super().__init__(config, ends, dtype)
        parts = [{} for _ in range(config.model.layers)]
        for name in filter(lambda one: one not in ends, weights):
            block, _, own = name.removeprefix("block").partition(".")
            parts[int(block)][own] = weights[name]
        self.blocks = torch.nn.ModuleList(Block(config, own, dtype, fused) for own in parts)

    def forward(self, tokens, targets, angles, hidden):
        """Return the mean loss of the batch, a tensor of one element."""
        table = self.weight("embedding.tokens")
        x = functional.embedding(tokens, table)
        if (positions := self.weight("embedding.positions")) is not None:
            x = x + positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, angles, hidden)
        head = table if self.model.tied else self.weight("head.table")
        logits = functional.linear(self.norm(x, "final_norm"), head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchDecoder:
    """Loss, gradients by autograd, clipping and AdamW.

    weights: our parameters by name, whole, in their logical shapes; they are copied. config:
    resolved; its TrainConfig applies to PyTorch too. compiled: by torch.compile. dtype: the type
    that the model computes in; if it is not the weights' own, a rounded copy of them is used.
    loss_scale: the loss is multiplied by it, and the gradients are divided by it. fused: whether
    attention is scaled_dot_product_attention. fused_update: whether AdamW is one pass. spread: over
    all ranks of the process group, by "ddp" or "fsdp"; each rank then takes rows of its own.
    """

    def __init__(
        self,
        config,
        batch,
        weights,
        *,
        device="cpu",
        compiled=False,
        dtype=None,
        loss_scale=1.0,
        fused=False,
        fused_update=False,
        spread=None,
    ):
        self.config, self.device, self.loss_scale = config, device, loss_scale
        self.tokens, self.targets = (
            torch.from_numpy(x).to(device) for x in (batch.tokens, batch.targets)
        )
        seq_len = batch.tokens.shape[1]
        self.hidden = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
        self.shapes = {name: w.shape for name, w in weights.items()}
        tensors = {
            name: torch.tensor(self._their_layout(name, w), device=device)
            for name, w in weights.items()
        }
        dtype = dtype or tensors["embedding.tokens"].dtype
        self.angles = self._angles(seq_len, dtype)
        self.model = Decoder(config, tensors, dtype, fused)
        self.run = self._spread(spread)
        if compiled:
            self.run = torch.compile(self.run)
        train, leaves = config.train, self.leaves.values()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in leaves if w.ndim > 1]},
                {"params": [w for w in leaves if w.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=fused_update or None,
        )

    def _spread(self, spread):
        """Return what is called for a loss: the model, or the model of all ranks."""
        if spread == "ddp":
            return torch.nn.parallel.DistributedDataParallel(self.model)
        if spread == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for one in (*self.model.blocks, self.model):
                fully_shard(one)
        return self.model

    @property
    def leaves(self):
        """{our name: PyTorch's parameter}."""
        places = {name: re.sub(r"^block(\d+)\.", r"blocks \1 ", name) for name in self.shapes}
        return {
            name: self.model.get_parameter(own_name(place).replace(" ", "."))
            for name, place in places.items()
        }

    def _is_product(self, name, ndim):
        of_experts = self.config.model.experts and ".moe." in name
        return name.startswith("block") and name.endswith(".w") and ndim > 1 and not of_experts

    def _their_layout(self, name, w):
        """Return a matrix as torch.nn.Linear stores it, (out, in), so that its product adds the
        bias.
        """
        if name.endswith(".b"):
            w = w.reshape(-1)
        elif self._is_product(name, w.ndim):
            outputs_first = self.config.model.rows == "out"
            # The inputs of a projection are heads, the outputs of others are.
            first = 1 if name.endswith(".proj.w") == outputs_first else w.ndim - 1
            w = w.reshape(int(np.prod(w.shape[:first])), -1)
            w = w if outputs_first else w.T
        return np.ascontiguousarray(w)

    def _our_layout(self, name, x):
        """Return an array of PyTorch's in the logical shape of our parameter."""
        shape = self.shapes[name]
        turn = self._is_product(name, len(shape)) and self.config.model.rows == "in"
        return (x.T if turn else x).reshape(shape)

    def gradients(self):
        """Return {name: gradient} of every parameter, in our layout."""
        return {
            name: self._our_layout(name, w.grad.cpu().numpy()) for name, w in self.leaves.items()
        }

    def weights(self):
        """Return {name: value} of every parameter, in our layout."""
        return {
            name: self._our_layout(name, w.detach().cpu().numpy()).copy()
            for name, w in self.leaves.items()
        }

    def _angles(self, seq_len, dtype):
        """Return cosine and sine (T, d), the same for each half of a head, or None without
        rotation.
        """
        model = self.config.model
        if model.positions != "rope":
            return None
        table = rope_table(seq_len, model.head_dim, model.rope_theta, model.rope_scaling)
        both = np.concatenate([table, table], axis=-1)
        return [torch.tensor(both[:, i], dtype=dtype, device=self.device) for i in range(2)]

    def forward_backward(self, step):
        """Return the loss of these rows; leave the gradients in the leaves."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run(self.tokens, self.targets, self.angles, self.hidden)
        (loss * self.loss_scale).backward()
        if self.loss_scale != 1.0:
            for w in self.leaves.values():
                w.grad /= self.loss_scale
        return loss.item()

    def synchronize(self):
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def update(self, step):
        """Clip and apply the gradients; return their norm before clipping. Steps count from 1."""
        train = self.config.train
        norm = torch.nn.utils.clip_grad_norm_(self.leaves.values(), train.clip or np.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        self.optimizer.step()
        return getattr(norm, "full_tensor", lambda: norm)().item()
