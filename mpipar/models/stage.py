"""What the stages of all models are: a contiguous run of layers."""

from __future__ import annotations

from mpipar.layers.param import FlatParams


class LayerRun:
    """Layers in order, and their parameters in flat buffers; a model derives its own from it.

    layers: each with forward, backward_input, backward_weight and params. loss: the last of them on
    the last stage, else None. elsewhere: names of parameters that another stage's buffers hold.
    copies: see the model's Stage. in_shape(batch), out_shape(batch), given by the model: shapes of
    the activations that enter and leave.
    """

    def __init__(self, ops, stage, layers, loss, elsewhere=(), copies=None):
        self.ops, self.stage, self.layers, self.loss = ops, stage, layers, loss
        # One Param per name: a tied table may be in two layers here, or belong to another stage's
        # buffers.
        params = {param.name: param for layer in layers for param in layer.params}
        own = [param for name, param in params.items() if name not in elsewhere]
        if copies is not None:
            self._mark_copies(own, copies)
        self.flat = FlatParams(ops, own)

    def _mark_copies(self, params, copies):
        for param in params:
            tied = self.is_tied(param)
            groups = copies["tied_groups"] if tied else copies["groups"]
            param.grad_groups = (*param.grad_groups, *groups)
            owner = copies["table_owner"] if tied else copies["owner"]
            param.owner = param.owner and owner

    def is_tied(self, param) -> bool:
        """Whether the first and the last stage share this parameter."""
        return False

    def set_loss_scale(self, scale: float) -> None:
        """What the loss backward multiplies by: 1 / number of targets in the global batch."""
        if self.loss is not None:
            self.loss.scale = scale

    def forward(self, x, stash):
        """Activations for the next stage; on the last stage the sum of the losses."""
        for layer in self.layers:
            x = layer.forward(x, stash)
        return x

    def backward_input(self, dy, stash):
        """dx for the stage before; dy is None on the last stage."""
        for layer in reversed(self.layers):
            dy = layer.backward_input(dy, stash)
        return dy

    def backward_weight(self, stash):
        """Accumulate all gradients of the stage; afterwards the stash is empty."""
        for layer in reversed(self.layers):
            layer.backward_weight(stash)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"

    def backward(self, dy, stash, recorder):
        """Both halves, layer by layer, so that each layer's stash is freed as early as possible."""
        for layer in reversed(self.layers):
            recorder.phase = "I"
            dy = layer.backward_input(dy, stash)
            recorder.phase = "W"
            layer.backward_weight(stash)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"
        return dy


def stage_parts(stage: int, stage_layers: tuple[int, ...]) -> tuple[range, bool, bool]:
    """Block indices of a stage, whether it is the first, whether it is the last."""
    first = sum(stage_layers[:stage])
    blocks = range(first, first + stage_layers[stage])
    return blocks, stage == 0, stage == len(stage_layers) - 1


def balance(layers: int, num_stages: int, head: float) -> tuple[int, ...]:
    """Blocks per stage so that the slowest stage is as fast as possible.

    head: cost of the last stage beside its blocks, in blocks. The first stage's other layers cost
    next to nothing. A stage may hold no block.
    """
    low = layers // num_stages  # at least the mean without the head
    best = None
    for last in range(max(0, low - int(head) - 1), low + 1):
        rest = layers - last
        if num_stages == 1:
            return (layers,)
        share, extra = divmod(rest, num_stages - 1)
        slowest = max(share + (extra > 0), last + head)
        # Spare blocks go to the later of the other stages: the first ones stash more microbatches.
        split = (*[share] * (num_stages - 1 - extra), *[share + 1] * extra, last)
        if best is None or (slowest, -last) < best[:2]:
            best = (slowest, -last, split)
    return best[2]
