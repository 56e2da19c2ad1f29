"""The fused loss of Mixtape."""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.kernels.common import (
    Gradients,
    Smoothing,
    add_product_,
    at_least_float32,
    chunks,
    compute_dtype,
    elementwise,
    gradient_in_forward,
    gradient_scale,
    longest,
)


def mixtape_loss(
    contexts: Tensor,
    rare_context: Tensor,
    gate_contexts: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    bias: Tensor,
    target: Tensor,
    noise: float,
    smoothing: Smoothing,
    mask: Tensor | None = None,
):
    """Label-smoothed cross entropy of Mixtape (eq. 2 to 6), and its negative log-likelihood, summed, in nats.

    Scores of the S frequent tokens are mixed, those of the others come from contexts that are.

    Args:
        contexts: h_k, [N, K, E].
        rare_context: Σ_k π_k h_k with the shared priors, [N, E].
        gate_contexts: [N, K−1, d]; times ``gate_weight`` they are the gate logits.
        weight: w_x, [V, E].
        gate_weight: [S, d].
        bias: b_x, [V]; −∞ where a token cannot be predicted.
        target: [N].
        noise: standard deviation of the noise on the frequent tokens' gate logits, drawn chunk by chunk.
        mask: [V], true where bias is −∞.
    """
    num_components = contexts.size(1)
    dtype = compute_dtype(contexts)
    contexts, rare_context, gate_contexts = (tensor.to(dtype) for tensor in (contexts, rare_context, gate_contexts))

    def compute(needed, contexts, rare_context, gate_contexts, weight, gate_weight, bias):
        ops = elementwise(contexts.device)
        wide = at_least_float32(dtype)
        scale = gradient_scale(dtype)
        gradients = Gradients(
            needed, contexts=contexts, rare_context=rare_context, gate_contexts=gate_contexts,
            weight=weight, gate_weight=gate_weight, bias=bias,
        )  # fmt: skip
        num_frequent = len(gate_weight)
        frequent, rare = weight.to(dtype).split([num_frequent, len(weight) - num_frequent])
        gate_matrix, offset = gate_weight.to(dtype), bias.to(wide)
        values = len(weight) + (2 * num_components - 1) * num_frequent
        slices = chunks(len(target), values * wide.itemsize)
        size = longest(slices)
        score_buffer = contexts.new_empty(size, len(weight))
        leaf_buffer = contexts.new_empty(num_components * size, num_frequent)
        gate_buffer = contexts.new_empty((num_components - 1) * size, num_frequent)
        nll, spread = torch.zeros(2, dtype=wide, device=contexts.device)
        allowed_bias = offset if mask is None else offset.masked_fill(mask, 0.0)
        for rows in slices:
            rare_rows = rare_context[rows]
            n = len(rare_rows)
            # component by component, so that each one's scores are one block
            context = contexts[rows].transpose(0, 1).flatten(0, 1)  # [K·n, E]
            gate_context = gate_contexts[rows].transpose(0, 1).flatten(0, 1)
            leaves = torch.mm(context, frequent.t(), out=leaf_buffer[: len(context)])
            gates = torch.mm(gate_context, gate_matrix.t(), out=gate_buffer[: len(gate_context)])
            by_leaf, by_gate = leaves.view(-1, n, num_frequent), gates.view(-1, n, num_frequent)
            scores = score_buffer[:n]
            frequent_scores, rare_scores = scores[:, :num_frequent], scores[:, num_frequent:]
            ops.mix_(by_leaf, by_gate, noise, frequent_scores)
            torch.mm(rare_rows, rare.t(), out=rare_scores)
            if smoothing.epsilon > 0:
                total = scores.sum(dtype=wide)
                if mask is not None:
                    total -= scores[:, mask].sum(dtype=wide)
                spread -= total + n * allowed_bias.sum()
            chunk_nll, log_sum_exp = ops.softmax_minus_label_(
                scores, offset, target[rows], smoothing.target_weight, scale
            )
            nll += chunk_nll.sum()
            if smoothing.epsilon > 0:
                spread += smoothing.num_tokens * log_sum_exp.sum()
                scores -= scale * smoothing.epsilon
                if mask is not None:
                    scores.masked_fill_(mask, 0.0)
            if not any(needed):
                continue
            if gradients.bias is not None:
                gradients.bias.add_(scores.sum(0, dtype=wide), alpha=1 / scale)
            if gradients.rare_context is not None:
                add_product_(gradients.rare_context[rows], rare_scores, rare, 1 / scale)
            ops.mix_backward_(by_leaf, by_gate, frequent_scores)
            if gradients.weight is not None:
                add_product_(gradients.weight[num_frequent:], rare_scores.t(), rare_rows, 1 / scale)
                add_product_(gradients.weight[:num_frequent], leaves.t(), context, 1 / scale)
            if gradients.contexts is not None:
                add_transposed(gradients.contexts[rows], leaves, frequent, 1 / scale)
            if gradients.gate_weight is not None:
                add_product_(gradients.gate_weight, gates.t(), gate_context, 1 / scale)
            if gradients.gate_contexts is not None:
                add_transposed(gradients.gate_contexts[rows], gates, gate_matrix, 1 / scale)
        loss = nll if smoothing.epsilon == 0 else smoothing.loss(nll, spread)
        return loss, nll, gradients.all()

    return gradient_in_forward(compute, contexts, rare_context, gate_contexts, weight, gate_weight, bias)


def add_transposed(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """total [n, k, e] += alpha · left [k·n, s] @ right [s, e]."""
    n, k, e = total.shape
    total.add_((left @ right).view(k, n, e).transpose(0, 1), alpha=alpha)
