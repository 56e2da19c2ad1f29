"""The fused loss of one softmax: softmax, Mixture of Contexts, and maps of the scores before it.

Shapes: N tokens, n of a chunk, E embedding, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.errors import UserError
from mixtape_plugin.kernels.common import FusedLoss, Smoothing, chunks, longest
from mixtape_plugin.kernels.curves import Curve
from mixtape_plugin.kernels.precision import at_least_float32, compute_dtype


def softmax_loss(
    contexts: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    smoothing: Smoothing,
    mask: Tensor | None = None,
    curve: Curve | None = None,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy of softmax_x(f(h·w_x + b_x)), and its negative log-likelihood, summed, in nats.

    Args:
        contexts: h, [N, E].
        weight: w_x, [V, E].
        bias: b_x, [V]; −∞ where a token cannot be predicted; with a curve, finite.
        target: [N].
        mask: [V], true where a token cannot be predicted.
        curve: f; None: f(z) = z.

    Raises:
        UserError: a curve without ``inputs`` depends on tensors that want a gradient.
    """
    contexts = contexts.to(compute_dtype(contexts))
    if curve is not None:
        score = contexts.new_zeros(1, dtype=at_least_float32(contexts.dtype))
        if not curve.inputs and curve.value(score).requires_grad:
            raise UserError(
                f"{type(curve).__name__} depends on tensors that want a gradient, and a fused loss has one only for "
                "those that its inputs name: name them there, or use --output-impl eager"
            )
        loss = CurveSoftmaxLoss(target, smoothing, mask, curve)
        return loss.loss_and_nll(contexts=contexts, weight=weight, bias=bias, **curve.inputs)
    return SoftmaxLoss(target, smoothing, mask).loss_and_nll(contexts=contexts, weight=weight, bias=bias)


class SoftmaxLoss(FusedLoss):
    """:func:`softmax_loss` without a curve. Label smoothing needs no pass over the scores:
    Σ_x z_x = h·Σ_x w_x + Σ_x b_x."""

    context_constant = None  # what each context's gradient has beside its product

    def begin(self, contexts: Tensor, weight: Tensor, bias: Tensor) -> list:
        self.contexts, self.matrix, self.bias = contexts, weight.to(self.dtype), bias.to(self.wide)
        slices = chunks(len(self.target), len(weight), self.dtype, weight.device)
        self.buffer = self.ops.empty_rows(longest(slices), len(weight), self.dtype, weight.device)
        if self.smoothing.epsilon > 0:
            self.begin_smoothing()
        return slices

    def begin_smoothing(self) -> None:
        """The gradient of ε·spread in a context has the term −ε·Σ_x w_x, the same for all."""
        self.counted = torch.ones_like(self.bias)
        if self.mask is not None:
            self.counted[self.mask] = 0.0
        self.weight_sum = self.counted @ self.matrix.to(self.wide)
        self.context_constant = -self.smoothing.epsilon * self.weight_sum

    def add_chunk(self, rows: slice) -> None:
        context = self.contexts[rows]
        scores = torch.mm(context, self.matrix.t(), out=self.buffer[: len(context)])  # [n, V]
        self.differentiate(scores, self.target[rows])
        self.add_product("contexts", scores, self.matrix, rows, self.context_constant)
        self.add_product("weight", scores.t(), context)
        self.add_rows("bias", scores)

    differentiate = FusedLoss.softmax_minus_label_

    def finish(self) -> None:
        """The part of label smoothing that is linear in the scores: spread = V·logsumexp(z) − Σ_x z_x."""
        epsilon = self.smoothing.epsilon
        if epsilon == 0:
            return
        bias = self.bias if self.mask is None else self.bias.masked_fill(self.mask, 0.0)
        context_sum = self.contexts.sum(0, dtype=self.wide)
        self.spread -= context_sum @ self.weight_sum
        self.spread -= len(self.target) * bias.sum()
        if self.grad["weight"] is not None:
            self.grad["weight"].addr_(self.counted, context_sum, alpha=-epsilon)
        if self.grad["bias"] is not None:
            self.grad["bias"].sub_(self.counted, alpha=epsilon * len(self.target))


class CurveSoftmaxLoss(SoftmaxLoss):
    """:func:`softmax_loss` with a curve. Label smoothing is part of the pass over the scores: Σ_x f(z_x) has no
    shortcut."""

    def __init__(self, target: Tensor, smoothing: Smoothing, mask: Tensor | None, curve: Curve):
        super().__init__(target, smoothing, mask)
        self.curve = curve

    def begin(self, contexts: Tensor, weight: Tensor, bias: Tensor, **curve_inputs) -> list:
        self.curve.begin(self.wide, any(self.grad[name] is not None for name in curve_inputs))
        return super().begin(contexts, weight, bias)

    def differentiate(self, scores: Tensor, target: Tensor) -> None:
        nll, spread = self.ops.curve_softmax_minus_label_(
            scores, self.bias, target, self.curve, self.smoothing.target_weight, self.smoothing.epsilon, self.mask,
            self.scale,
        )  # fmt: skip
        self.nll += nll.sum()
        self.spread += spread.sum()

    def begin_smoothing(self) -> None:
        """Nothing: it is a part of :meth:`differentiate`."""

    def finish(self) -> None:
        needed = [name for name in self.curve.inputs if self.grad[name] is not None]
        gradients = self.curve.gradients() if needed else {}
        for name in needed:
            self.grad[name] += gradients[name]
