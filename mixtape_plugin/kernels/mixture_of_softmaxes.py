"""The fused loss of Mixture of Softmaxes.

Shapes: N tokens, n of a chunk, K components, E embedding, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.kernels.common import FusedLoss, Smoothing, chunks, longest
from mixtape_plugin.kernels.precision import at_least_float32, compute_dtype
from mixtape_plugin.kernels.torch_ops import log_mixture_


@torch.no_grad()
def mixture_of_softmaxes_log_probs(contexts: Tensor, prior: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """log p(x|c), [N, V], for inference: arguments as of :func:`mixture_of_softmaxes_loss`."""
    num_components = contexts.size(1)
    contexts = contexts.to(compute_dtype(contexts))
    with torch.autocast(contexts.device.type, enabled=False):
        wide = at_least_float32(contexts.dtype)
        matrix, offset = weight.to(contexts.dtype), bias.to(wide)
        log_prior = F.log_softmax(prior, dim=1, dtype=wide)
        log_probs = torch.empty(len(contexts), len(weight), dtype=wide, device=contexts.device)
        for rows in chunks(len(contexts), num_components * len(weight), wide, weight.device, num_components):
            scores = F.linear(contexts[rows], matrix)  # [n, K, V]
            log_mixture_(scores, offset, log_prior[rows], log_probs[rows])
        return log_probs


def mixture_of_softmaxes_loss(
    contexts: Tensor,
    prior: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    smoothing: Smoothing,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy of Σ_k π_k softmax_x(h_k·w_x + b_x), and its negative log-likelihood, summed, in
    nats.

    Args:
        contexts: h_k, [N, K, E].
        prior: logits of π, [N, K].
        weight: w_x, [V, E].
        bias: b_x, [V]; −∞ where a token cannot be predicted.
        target: [N].
        mask: [V], true where bias is −∞.
    """
    contexts = contexts.to(compute_dtype(contexts))
    loss = MixtureOfSoftmaxesLoss(target, smoothing, mask)
    return loss.loss_and_nll(contexts=contexts, prior=prior, weight=weight, bias=bias)


class MixtureOfSoftmaxesLoss(FusedLoss):
    """:func:`mixture_of_softmaxes_loss`.

    The target's gradient needs each component's own softmax p_k alone: with the posterior r_k ∝ π_k p_k(target), that
    of the k-th scores is r_k (p_k − onehot(target)), and r_k goes into the factors of the products, not into the
    scores. Label smoothing needs every token's posterior, and more passes over a chunk's scores.
    """

    def begin(self, contexts: Tensor, prior: Tensor, weight: Tensor, bias: Tensor) -> list:
        self.contexts, self.matrix, self.bias = contexts, weight.to(self.dtype), bias.to(self.wide)
        self.log_prior = F.log_softmax(prior, dim=1, dtype=self.wide)
        self.num_components = k = contexts.size(1)
        slices = chunks(len(self.target), k * len(weight), self.dtype, weight.device, k)
        self.buffer = self.ops.empty_rows(longest(slices) * k, len(weight), self.dtype, weight.device)
        return slices

    def add_chunk(self, rows: slice) -> None:
        context = self.contexts[rows].flatten(0, 1)  # [n·K, E]
        scores = torch.mm(context, self.matrix.t(), out=self.buffer[: len(context)])  # [n·K, V]
        differentiate = self.differentiate if self.smoothing.epsilon == 0 else self.differentiate_smoothed
        grad_prior, share = differentiate(scores, rows)
        if not self.needs_gradient:
            return
        if self.grad["prior"] is not None:
            self.grad["prior"][rows] = grad_prior
        self.add_product("contexts", scores, self.matrix, rows)
        if share is None:  # the scores hold it
            self.add_product("weight", scores.t(), context)
            self.add_product("bias", scores.new_ones(1, len(scores)), scores)
        else:
            if self.grad["contexts"] is not None:
                self.grad["contexts"][rows].view(context.shape).mul_(share)
            self.add_product("weight", scores.t(), context * share.to(self.dtype))
            self.add_product("bias", share.t().to(self.dtype), scores)

    def differentiate(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """scores [n·K, V] become p_k − onehot(target); returns the gradient in the prior's logits, [n, K], and r,
        [n·K, 1], which the scores' gradient is to be multiplied by."""
        log_prior, target = self.log_prior[rows], self.target[rows].repeat_interleave(self.num_components)
        component_nll, _ = self.ops.softmax_minus_label_(scores, self.bias, target, 1.0, self.scale)
        log_joint = log_prior - component_nll.view(-1, self.num_components)
        self.nll -= torch.logsumexp(log_joint, 1).sum()
        posterior = torch.softmax(log_joint.clamp_(min=torch.finfo(self.wide).min), 1)
        return log_prior.exp() - posterior, posterior.view(-1, 1)

    def differentiate_smoothed(self, scores: Tensor, rows: slice) -> tuple[Tensor, None]:
        """scores [n·K, V] become the gradient of the loss; returns that in the prior's logits, [n, K], and None."""
        smoothing, log_prior = self.smoothing, self.log_prior[rows]
        nll, spread, posterior, rho = self.ops.mos_smoothing_(
            scores.view(-1, *log_prior.shape[1:], scores.size(1)), self.bias, log_prior, self.target[rows],
            smoothing.target_weight, smoothing.epsilon, self.mask, self.scale,
        )  # fmt: skip
        self.nll += nll.sum()
        self.spread += spread.sum()
        prior = log_prior.exp()
        return smoothing.loss(prior - posterior, smoothing.num_predictable * prior - rho), None
