"""The same decoder in PyTorch: the tests and the benchmarks compare with it.

Attention is explicit (product, mask, softmax, product), as mpipar computes it, or PyTorch's own
fused function. Products of Llama are those of its modules: one for each of q, k, v, gate and up.
"""

from __future__ import annotations

import numpy as np

from mpipar.ops.array_ops import rope_table
from mpipar.train.optim import learning_rate


class TorchDecoder:
    """Loss, gradients by autograd, clipping and AdamW, on leaf tensors named like our parameters.

    weights: our parameters by name, whole, in their logical shapes; they are copied. config:
    resolved; its TrainConfig applies to PyTorch too. compiled: by torch.compile. dtype: the type
    that the model computes in; if it is not the weights' own, a rounded copy of them is used.
    loss_scale: the loss is multiplied by it, and the gradients are divided by it. fused: whether
    attention is scaled_dot_product_attention. fused_update: whether AdamW is one pass.
    """

    def __init__(
        self,
        torch,
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
    ):
        self.torch, self.functional, self.config = torch, torch.nn.functional, config
        self.device, self.loss_scale = device, loss_scale
        self.read(batch)
        seq_len = batch.tokens.shape[1]
        self.hidden = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
        self.attend = self._fused if fused else self._explicit
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.leaves = {
            name: torch.tensor(self._their_layout(name, w), device=device).requires_grad_()
            for name, w in weights.items()
        }
        self.dtype = dtype or self.leaves["embedding.tokens"].dtype
        self.angles = self._angles(seq_len)
        train = config.train
        decayed = [w for w in self.leaves.values() if w.ndim > 1]
        plain = [w for w in self.leaves.values() if w.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=fused_update or None,
        )

    def read(self, batch):
        """Take the rows of the next step."""
        self.tokens, self.targets = (
            self.torch.from_numpy(x).to(self.device) for x in (batch.tokens, batch.targets)
        )

    @staticmethod
    def _is_product(name, ndim):
        return name.startswith("block") and name.endswith(".w") and ndim > 1

    def _their_layout(self, name, w):
        """Return a matrix as torch.nn.Linear stores it, (out, in), so that its product adds the
        bias.
        """
        if name.endswith(".b"):
            w = w.reshape(-1)
        elif self._is_product(name, w.ndim):
            of_heads = name.endswith(".proj.w")  # its inputs are heads, others' outputs are
            if self.config.model.rows == "out":
                outputs = 1 if of_heads or w.ndim == 2 else w.ndim - 1
                w = w.reshape(int(np.prod(w.shape[:outputs])), -1)
            else:
                inputs = w.ndim - 1 if of_heads else 1
                w = w.reshape(int(np.prod(w.shape[:inputs])), -1).T
        return np.ascontiguousarray(w)

    def _our_layout(self, name, x):
        """Return an array of PyTorch's in the logical shape of our parameter."""
        shape = self.shapes[name]
        turned = self._is_product(name, len(shape)) and self.config.model.rows == "in"
        return (x.T if turned else x).reshape(shape)

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

    def _weight(self, name):
        """Return the leaf in the model's type: the leaf itself if it has that type."""
        return self.leaves[name].to(self.dtype)

    def _linear(self, x, name):
        bias = self._weight(f"{name}.b") if f"{name}.b" in self.leaves else None
        return self.functional.linear(x, self._weight(f"{name}.w"), bias)

    def _norm(self, x, name):
        w, eps = self._weight(f"{name}.w"), self.config.model.norm_eps
        if self.config.model.norm == "rms":
            return self.functional.rms_norm(x, w.shape, w, eps)
        return self.functional.layer_norm(x, w.shape, w, self._weight(f"{name}.b"), eps)

    def _angles(self, seq_len):
        """Return cosine and sine (T, d), the same for each half of a head, or None without
        rotation.
        """
        model = self.config.model
        if model.positions != "rope":
            return None
        table = rope_table(seq_len, model.head_dim, model.rope_theta, model.rope_scaling)
        both = np.concatenate([table, table], axis=-1)
        return [
            self.torch.tensor(both[:, i], dtype=self.dtype, device=self.device) for i in range(2)
        ]

    def _turned(self, x):
        """Return x (B, H, T, d) rotated by its positions, as transformers does it."""
        if self.angles is None:
            return x
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.angles
        return x * cos + self.torch.cat((-second, first), dim=-1) * sin

    def _heads(self, x, name):
        """Return q (B, H, T, d), k and v (B, K, T, d) of x (B, T, D)."""
        if f"{name}.qkv.w" in self.leaves:
            qkv = self._linear(x, f"{name}.qkv").view(*x.shape[:2], 3, self.config.model.heads, -1)
            return [qkv[:, :, i].transpose(1, 2) for i in range(3)]
        width = self.config.model.head_dim
        return [
            self._linear(x, f"{name}.{part}").unflatten(-1, (-1, width)).transpose(1, 2)
            for part in "qkv"
        ]

    def _explicit(self, q, k, v):
        """Compute attention in its parts; keys and values are repeated for queries sharing them."""
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        probs = self.torch.softmax(scores.masked_fill(self.hidden, -float("inf")), dim=-1)
        return probs @ v

    def _fused(self, q, k, v):
        return self.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _wide(self, x, name):
        """Return the input of a block's last product."""
        h = self._linear(x, f"{name}.up")
        if self.config.model.activation == "swiglu":
            return self.functional.silu(self._linear(x, f"{name}.gate")) * h
        return self.functional.gelu(h, approximate="tanh")

    def _block(self, x, name):
        q, k, v = self._heads(self._norm(x, f"{name}.norm1"), f"{name}.attn")
        heads = self.attend(self._turned(q), self._turned(k), v).transpose(1, 2).flatten(2)
        x = x + self._linear(heads, f"{name}.attn.proj")
        h = self._wide(self._norm(x, f"{name}.norm2"), f"{name}.ffn")
        return x + self._linear(h, f"{name}.ffn.down")

    def _loss(self):
        """Return the mean loss of the batch, a tensor of one element."""
        table = self._weight("embedding.tokens")
        x = self.functional.embedding(self.tokens, table)
        if "embedding.positions" in self.leaves:
            x = x + self._weight("embedding.positions")[: self.tokens.shape[1]]
        for index in range(self.config.model.layers):
            x = self._block(x, f"block{index}")
        head = table if self.config.model.tied else self._weight("head.table")
        logits = self.functional.linear(self._norm(x, "final_norm"), head)
        logits = logits.to(self.torch.promote_types(logits.dtype, self.torch.float32))
        return self.functional.cross_entropy(logits.flatten(0, 1), self.targets.flatten())

    def forward_backward(self, step):
        """Return the loss; leave the gradients in the leaves."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        (loss * self.loss_scale).backward()
        if self.loss_scale != 1.0:
            for w in self.leaves.values():
                w.grad /= self.loss_scale
        return loss.item()

    def synchronize(self):
        """Wait for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def update(self, step):
        """Clip and apply the gradients; return their norm before clipping. Steps count from 1."""
        train = self.config.train
        norm = self.torch.nn.utils.clip_grad_norm_(self.leaves.values(), train.clip or np.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        self.optimizer.step()
        return norm.item()
