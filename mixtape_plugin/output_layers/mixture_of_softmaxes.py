"""Mixture of Softmaxes (Yang et al. 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.mixture_of_softmaxes import mixture_of_softmaxes_log_probs, mixture_of_softmaxes_loss
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.output_layers.base import rows
from mixtape_plugin.output_layers.mixture import SharedPriorLayer


class MixtureOfSoftmaxes(SharedPriorLayer):
    """p(x|c) = Σ_k π_k softmax_x(h_k·w_x + b_x), π = softmax(W_π g), h_k = tanh(W_k g + b_k)
    (MoS, section 2.4).

    :meth:`forward` returns log-probabilities in float32 or better, which are scores of themselves. With a gradient, it
    keeps two tensors [..., K, V] for the backward pass.

    Differs from the authors' code: that takes log(p + 1e-8), whose mass is 1 + V·1e-8; here the logarithm is a
    log-sum-exp.
    """

    label = "MoS"

    @property
    def scores_per_token(self) -> int:
        return self.num_components * self.vocab_size

    @property
    def score_rows(self) -> int:
        return self.num_components

    @property
    def multiply_adds(self) -> int:
        return self.num_components * (self.vocab_size + self.feature_dim) * self.embed_dim

    def forward(self, features: Tensor) -> Tensor:
        contexts, prior = self.context_vectors(features), self.prior(features)
        if self.is_fused_inference:
            leading = features.shape[:-1]
            log_probs = mixture_of_softmaxes_log_probs(
                rows(contexts, leading), rows(prior, leading), self.weight, self.logit_bias
            )
            return log_probs.view(*leading, self.vocab_size)
        logits = F.linear(contexts, self.weight, self.logit_bias)  # [..., K, V]
        dtype = at_least_float32(logits.dtype)
        log_prior = F.log_softmax(prior, dim=-1, dtype=dtype)  # [..., K]
        log_joint = log_prior.unsqueeze(-1) + F.log_softmax(logits, dim=-1, dtype=dtype)
        if self.vocabulary_mask is None:
            return torch.logsumexp(log_joint, dim=-2)
        # The gradient of a log-sum-exp over nothing but −∞ is NaN: it sees zeros there, and its gradient stops.
        log_probs = torch.logsumexp(log_joint.masked_fill(self.vocabulary_mask, 0.0), dim=-2)
        return log_probs.masked_fill(self.vocabulary_mask, -torch.inf)

    def log_probs(self, features: Tensor) -> Tensor:
        return self(features)

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        contexts = rows(self.context_vectors(features), features.shape[:-1], index)
        prior = rows(self.prior(features), features.shape[:-1], index)
        return mixture_of_softmaxes_loss(
            contexts, prior, self.weight, self.logit_bias, target, smoothing, self.vocabulary_mask
        )
