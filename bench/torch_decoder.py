"""The same decoder in PyTorch: the tests and the benchmarks compare with it.

Attention is explicit (product, mask, softmax, product), as mpipar computes it.
"""

from __future__ import annotations

import numpy as np

from mpipar.train.learning_rate import learning_rate


class TorchDecoder:
    """Loss, gradients by autograd, clipping and AdamW, on leaf tensors named like our parameters.

    weights: our parameters by name, whole, in their logical shapes; they are copied. config:
    resolved; its TrainConfig holds for PyTorch too. compiled: by torch.compile. dtype: the type
    that the model computes in; if it is not the weights' own, a rounded copy of them is used.
    loss_scale: the loss is multiplied by it, and the gradients are divided by it.
    """

    def __init__(self, torch, config, batch, weights, *, device="cpu", compiled=False,
                 dtype=None, loss_scale=1.0):
        self.torch, self.functional, self.config = torch, torch.nn.functional, config
        self.device, self.loss_scale = device, loss_scale
        self.tokens, self.targets = (
            torch.from_numpy(x).to(device) for x in (batch.tokens, batch.targets))
        seq_len = batch.tokens.shape[1]
        self.hidden = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.shapes = {name: w.shape for name, w in weights.items()}
        self.leaves = {
            name: torch.tensor(self._their_layout(name, w), device=device).requires_grad_()
            for name, w in weights.items()
        }
        self.dtype = dtype or self.leaves["embedding.tokens"].dtype
        train = config.train
        decayed = [w for w in self.leaves.values() if w.ndim > 1]
        plain = [w for w in self.leaves.values() if w.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
            betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay)

    @staticmethod
    def _is_product(name, ndim):
        return name.startswith("block") and name.endswith(".w") and ndim > 1

    @classmethod
    def _their_layout(cls, name, w):
        """A matrix as torch.nn.Linear keeps it, (out, in), so that its product adds the bias."""
        if name.endswith(".b"):
            w = w.reshape(-1)
        elif cls._is_product(name, w.ndim):
            inputs = w.ndim - 1 if name.endswith(".proj.w") else 1
            w = w.reshape(int(np.prod(w.shape[:inputs])), -1).T
        return np.ascontiguousarray(w)

    def _our_layout(self, name, x):
        """An array of PyTorch's in the logical shape of our parameter."""
        shape = self.shapes[name]
        return (x.T if self._is_product(name, len(shape)) else x).reshape(shape)

    def gradients(self):
        """Name -> gradient of every parameter, in our layout."""
        return {name: self._our_layout(name, w.grad.cpu().numpy())
                for name, w in self.leaves.items()}

    def weights(self):
        """Name -> value of every parameter, in our layout."""
        return {name: self._our_layout(name, w.detach().cpu().numpy()).copy()
                for name, w in self.leaves.items()}

    def _weight(self, name):
        """The leaf in the model's type: the leaf itself if it has that type."""
        return self.leaves[name].to(self.dtype)

    def _linear(self, x, name):
        return self.functional.linear(x, self._weight(f"{name}.w"), self._weight(f"{name}.b"))

    def _norm(self, x, name):
        w = self._weight(f"{name}.w")
        if self.config.model.norm == "rms":
            return self.functional.rms_norm(x, w.shape, w, 1e-5)
        return self.functional.layer_norm(x, w.shape, w, self._weight(f"{name}.b"), 1e-5)

    def _block(self, x, name):
        model = self.config.model
        qkv = self._linear(self._norm(x, f"{name}.norm1"), f"{name}.attn.qkv")
        qkv = qkv.view(*x.shape[:2], 3, model.heads, -1)  # (B, T, 3, H, d)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        probs = self.torch.softmax(scores.masked_fill(self.hidden, -float("inf")), dim=-1)
        heads = (probs @ v).transpose(1, 2).reshape(x.shape)
        x = x + self._linear(heads, f"{name}.attn.proj")
        h = self._linear(self._norm(x, f"{name}.norm2"), f"{name}.ffn.up")
        return x + self._linear(self.functional.gelu(h, approximate="tanh"), f"{name}.ffn.down")

    def _loss(self):
        """Mean loss of the batch, a tensor of one element."""
        table = self._weight("embedding.tokens")
        positions = self._weight("embedding.positions")[:self.tokens.shape[1]]
        x = self.functional.embedding(self.tokens, table) + positions
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
        """Clip and apply the gradients; returns their norm before clipping. Step counts from 1."""
        train = self.config.train
        norm = self.torch.nn.utils.clip_grad_norm_(self.leaves.values(), train.clip or np.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, step)
        self.optimizer.step()
        return norm.item()
