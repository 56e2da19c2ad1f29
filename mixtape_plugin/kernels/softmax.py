"""The fused loss of one softmax: softmax and Mixture of Contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.kernels.common import Gradients, Smoothing, add_product_, chunks, gradient_in_forward, longest
from mixtape_plugin.kernels.dispatch import elementwise
from mixtape_plugin.kernels.precision import at_least_float32, compute_dtype, gradient_scale, score_bytes


def softmax_loss(
    contexts: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    smoothing: Smoothing,
    mask: Tensor | None = None,
):
    """Label-smoothed cross entropy of softmax_x(h·w_x + b_x), and its negative log-likelihood, summed, in nats.

    Label smoothing needs no pass over the scores: Σ_x z_x = h·Σ_x w_x + Σ_x b_x.

    Args:
        contexts: h, [N, E].
        weight: w_x, [V, E].
        bias: b_x, [V]; −∞ where a token cannot be predicted.
        target: [N].
        mask: [V], true where bias is −∞.
    """
    contexts = contexts.to(compute_dtype(contexts))

    def compute(needed, contexts, weight, bias):
        ops = elementwise(contexts.device)
        dtype = contexts.dtype
        wide = at_least_float32(dtype)
        scale = gradient_scale(dtype)
        gradients = Gradients(needed, contexts=contexts, weight=weight, bias=bias)
        matrix, offset = weight.to(dtype), bias.to(wide)
        slices = chunks(len(target), len(weight) * score_bytes(wide))
        buffer = ops.score_buffer(longest(slices), len(weight), dtype, contexts.device)
        negative_log_likelihoods = torch.zeros(len(target), dtype=wide, device=contexts.device)
        log_sum_exps = torch.zeros_like(negative_log_likelihoods)
        for rows in slices:
            context = contexts[rows]
            scores = torch.mm(context, matrix.t(), out=buffer[: len(context)])
            negative_log_likelihoods[rows], log_sum_exps[rows] = ops.softmax_minus_label_(
                scores, offset, target[rows], smoothing.target_weight, scale
            )
            if gradients.contexts is not None:
                add_product_(gradients.contexts[rows], scores, matrix, 1 / scale)
            if gradients.weight is not None:
                add_product_(gradients.weight, scores.t(), context, 1 / scale)
            if gradients.bias is not None:
                gradients.bias.add_(scores.sum(0, dtype=wide), alpha=1 / scale)
        nll = negative_log_likelihoods.sum()
        if smoothing.epsilon == 0:
            return nll, None, gradients.all()

        others = torch.ones_like(offset)
        if mask is not None:
            others[mask] = 0.0
            offset = offset.masked_fill(mask, 0.0)
        weight_sum = others @ matrix.to(wide)
        context_sum = contexts.sum(0, dtype=wide)
        spread = smoothing.vocab_size * log_sum_exps.sum() - context_sum @ weight_sum - len(target) * offset.sum()
        if gradients.contexts is not None:
            gradients.contexts.sub_(weight_sum, alpha=smoothing.epsilon)
        if gradients.weight is not None:
            gradients.weight.addr_(others, context_sum, alpha=-smoothing.epsilon)
        if gradients.bias is not None:
            gradients.bias.sub_(others, alpha=smoothing.epsilon * len(target))
        return nll, spread, gradients.all()

    return gradient_in_forward(compute, smoothing, contexts, weight, bias)
