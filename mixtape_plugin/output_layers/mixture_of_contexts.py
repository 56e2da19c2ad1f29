"""Mixture of Contexts, the control experiment of the MoS paper (Yang et al. 2018)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.softmax import softmax_loss
from mixtape_plugin.output_layers.base import rows
from mixtape_plugin.output_layers.mixture import SharedPriorLayer


class MixtureOfContexts(SharedPriorLayer):
    """p(x|c) = softmax_x((Σ_k π_k h_k)·w_x + b_x), π = softmax(W_π g), h_k = tanh(W_k g + b_k)
    (MoS, eq. 2).

    The parameters of MoS, mixed before the softmax instead of after: log P stays of rank E + 2 at most.
    """

    label = "MoC"

    @property
    def scores_per_token(self) -> int:
        return self.vocab_size

    @property
    def multiply_adds(self) -> int:
        return (self.vocab_size + self.num_components * self.feature_dim) * self.embed_dim

    def mixed_context(self, features: Tensor) -> Tensor:
        """Σ_k π_k h_k, [..., E]."""
        return (self.priors(features).unsqueeze(-1) * self.context_vectors(features)).sum(-2)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(self.mixed_context(features), self.weight, self.logit_bias)

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        context = rows(self.mixed_context(features), features.shape[:-1], index)
        return softmax_loss(context, self.weight, self.logit_bias, target, smoothing, self.vocabulary_mask)
