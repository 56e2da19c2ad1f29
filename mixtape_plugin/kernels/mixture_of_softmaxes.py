"""The fused loss of Mixture of Softmaxes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.kernels.common import Gradients, Smoothing, add_product_, chunks, gradient_in_forward, longest
from mixtape_plugin.kernels.dispatch import elementwise
from mixtape_plugin.kernels.precision import at_least_float32, compute_dtype, gradient_scale, score_bytes


@torch.no_grad()
def mixture_of_softmaxes_log_probs(contexts: Tensor, prior: Tensor, weight: Tensor, bias: Tensor):
    """log p(x|c), [N, V], for inference: arguments as of :func:`mixture_of_softmaxes_loss`."""
    num_components = contexts.size(1)
    contexts = contexts.to(compute_dtype(contexts))
    with torch.autocast(contexts.device.type, enabled=False):
        wide = at_least_float32(contexts.dtype)
        matrix, offset = weight.to(contexts.dtype), bias.to(wide)
        log_prior = F.log_softmax(prior, dim=1, dtype=wide)
        log_probs = torch.empty(len(contexts), len(weight), dtype=wide, device=contexts.device)
        for rows in chunks(len(contexts), num_components * len(weight) * score_bytes(wide), num_components):
            scores = F.linear(contexts[rows], matrix).to(wide).add_(offset)  # [n, K, V]
            scores += (log_prior[rows] - torch.logsumexp(scores, 2)).unsqueeze(2)
            torch.logsumexp(scores, 1, out=log_probs[rows])
        return log_probs


def mixture_of_softmaxes_loss(
    contexts: Tensor,
    prior: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    smoothing: Smoothing,
    mask: Tensor | None = None,
):
    """Label-smoothed cross entropy of Σ_k π_k softmax_x(h_k·w_x + b_x), and its negative log-likelihood, summed, in
    nats.

    The target's gradient needs each component's own softmax p_k alone: with the posterior r_k ∝ π_k p_k(target), that
    of the k-th scores is r_k (p_k − onehot(target)), and r_k goes into the factors of the products, not into the
    scores. Label smoothing needs every token's posterior, and more passes over a chunk's scores.

    Args:
        contexts: h_k, [N, K, E].
        prior: logits of π, [N, K].
        weight: w_x, [V, E].
        bias: b_x, [V]; −∞ where a token cannot be predicted.
        target: [N].
        mask: [V], true where bias is −∞.
    """
    num_components = contexts.size(1)
    contexts = contexts.to(compute_dtype(contexts))

    def compute(needed, contexts, prior, weight, bias):
        ops = elementwise(contexts.device)
        dtype = contexts.dtype
        wide = at_least_float32(dtype)
        scale = gradient_scale(dtype)
        gradients = Gradients(needed, contexts=contexts, prior=prior, weight=weight, bias=bias)
        matrix, offset = weight.to(dtype), bias.to(wide)
        log_prior = F.log_softmax(prior, dim=1, dtype=wide)
        slices = chunks(len(target), num_components * len(weight) * score_bytes(wide), num_components)
        buffer = ops.score_buffer(longest(slices) * num_components, len(weight), dtype, contexts.device)
        nll = torch.zeros((), dtype=wide, device=contexts.device)
        spread = torch.zeros_like(nll)
        for rows in slices:
            label = target[rows]
            context = contexts[rows].flatten(0, 1)  # [n·K, E]
            scores = torch.mm(context, matrix.t(), out=buffer[: len(context)])
            if smoothing.epsilon == 0:
                component_nll, _ = ops.softmax_minus_label_(
                    scores, offset, label.repeat_interleave(num_components), 1.0, scale
                )
                log_joint = log_prior[rows] - component_nll.view(-1, num_components)
                nll -= torch.logsumexp(log_joint, 1).sum()
                posterior = torch.softmax(log_joint.clamp_(min=torch.finfo(wide).min), 1)
                grad_prior = log_prior[rows].exp() - posterior
                share = posterior.view(-1, 1)
            else:
                chunk_nll, chunk_spread, posterior, rho = ops.mos_smoothing_(
                    scores.view(-1, num_components, len(weight)), offset, log_prior[rows], label,
                    smoothing.target_weight, smoothing.epsilon, mask, scale,
                )  # fmt: skip
                nll += chunk_nll.sum()
                spread += chunk_spread.sum()
                probs = log_prior[rows].exp()
                grad_prior = smoothing.loss(probs - posterior, smoothing.vocab_size * probs - rho)
                share = None  # the scores hold it
            if gradients.prior is not None:
                gradients.prior[rows] = grad_prior
            if gradients.contexts is not None:
                grad_context = gradients.contexts[rows].view(-1, contexts.size(2))
                add_product_(grad_context, scores, matrix, 1 / scale)
                if share is not None:
                    grad_context *= share
            if gradients.weight is not None:
                weighted = context if share is None else context * share.to(dtype)
                add_product_(gradients.weight, scores.t(), weighted, 1 / scale)
            if gradients.bias is not None:
                ones = scores.new_ones(1, len(scores)) if share is None else share.t().to(dtype)
                add_product_(gradients.bias.unsqueeze(0), ones, scores, 1 / scale)
        return nll, spread, gradients.all()

    return gradient_in_forward(compute, smoothing, contexts, prior, weight, bias)
