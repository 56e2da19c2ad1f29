"""What the fused losses share: chunks, products that add up in float32, and the autograd function around them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mixtape_plugin.kernels.precision import at_least_float32

# Scores of a chunk. On a CPU, glibc keeps blocks of up to 32 MiB for the next step; larger ones are given back to the
# system, and clearing their pages anew takes longer than using them.
CHUNK_BYTES = 2**25
# A matrix product of fewer rows no longer runs at full speed, whatever memory it saves.
MIN_ROWS = 256


class Smoothing(NamedTuple):
    """Label smoothing: loss = target_weight · nll + epsilon · Σ_x −log p(x), over the tokens that are not masked."""

    vocab_size: int
    target_weight: float = 1.0
    epsilon: float = 0.0

    @classmethod
    def over(cls, vocab_size: int, label_smoothing: float) -> Smoothing:
        """The target keeps 1 − ε, each of the others gets ε / (V − 1), as in fairseq."""
        if label_smoothing == 0:
            return cls(vocab_size)
        epsilon = label_smoothing / (vocab_size - 1)
        return cls(vocab_size, 1 - label_smoothing - epsilon, epsilon)

    def loss(self, nll: Tensor, spread: Tensor) -> Tensor:
        return self.target_weight * nll + self.epsilon * spread


def chunks(num_tokens: int, bytes_per_token: int, rows_per_token: int = 1) -> list:
    """Slices of equal size, but for the last, whose scores fit into :data:`CHUNK_BYTES`, or have :data:`MIN_ROWS`."""
    size = max(CHUNK_BYTES // bytes_per_token, -(-MIN_ROWS // rows_per_token), 1)
    number = max(-(-num_tokens // size), 1)
    size = max(-(-num_tokens // number), 1)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def longest(slices: list) -> int:
    """Tokens of the longest chunk, which is the first."""
    return slices[0].stop - slices[0].start if slices else 0


@functools.lru_cache(maxsize=None)
def has_float32_products() -> bool:
    """Whether torch multiplies half-precision matrices on a GPU into a float32 one."""
    return "dtype" in torch.ops.aten.mm.overloads()


def add_product_(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """total += alpha · left @ right, where total may be of a wider type than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    elif left.is_cuda and has_float32_products():
        total.add_(torch.mm(left, right, out_dtype=total.dtype), alpha=alpha)
    elif left.dtype == torch.float16:  # sums over a chunk can be beyond its range
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=alpha)
    else:
        total.add_(torch.mm(left, right), alpha=alpha)


class Gradients:
    """The gradients of a loss's inputs, None for those that nobody asks for: zeros of their shapes to add to, in
    float32 or better."""

    def __init__(self, needed, **inputs):
        for need, (name, tensor) in zip(needed, inputs.items()):
            dtype = at_least_float32(tensor.dtype)
            total = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if need else None
            setattr(self, name, total)
        self.names = list(inputs)

    def all(self) -> list:
        return [getattr(self, name) for name in self.names]


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compute, smoothing, *inputs):
        nll, spread, gradients = compute(ctx.needs_input_grad[2:], *inputs)
        ctx.save_for_backward(*gradients)
        if smoothing.epsilon > 0:
            ctx.mark_non_differentiable(nll)
            return smoothing.loss(nll, spread), nll
        return nll, nll.clone()

    @staticmethod
    def backward(ctx, grad_loss, grad_nll):
        if torch.is_grad_enabled():  # create_graph: what comes before the loss could be derived again, the loss not
            raise RuntimeError("a fused loss has no second derivative: use --output-impl eager")
        scale = grad_loss + grad_nll  # of nll there is one only where it is the loss, and zero otherwise
        # A second [V, E] takes longer than all else here. Where backward may run again, what is saved has to stay.
        multiply = torch.mul if keeps_graph() else torch.Tensor.mul_
        return (None, None, *(None if total is None else multiply(total, scale) for total in ctx.saved_tensors))


def keeps_graph() -> bool:
    """Whether the backward pass that is running may run again (``retain_graph``); true where torch does not tell."""
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or tell()


def gradient_in_forward(compute, smoothing: Smoothing, *inputs: Tensor):
    """The loss and negative log-likelihood of a function, and in backward the gradients that it gives with them.

    Args:
        compute: takes which of the inputs need a gradient, and the inputs, and returns nll, spread (not used without
            label smoothing) and the gradients of the loss.
        smoothing: without it loss and nll are the same, and both can be differentiated; else only the loss can.
    """
    with torch.autocast(inputs[0].device.type, enabled=False):
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return _GradientInForward.apply(compute, smoothing, *inputs)
        nll, spread, _ = compute([False] * len(inputs), *inputs)
        return (smoothing.loss(nll, spread) if smoothing.epsilon > 0 else nll), nll
