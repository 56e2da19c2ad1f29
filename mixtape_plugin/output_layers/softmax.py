"""The plain softmax, for comparison."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.softmax import softmax_loss
from mixtape_plugin.output_layers.base import OutputLayer, rows


class Softmax(OutputLayer):
    """p(x|c) = softmax_x(α g·w_x + b_x) (Mixtape, section 2, with h_c = g and α = 1): log P has rank at most E + 2.

    No context projection, so E = D. The bias is what the other layers have too; fairseq's own has none.
    """

    label = "softmax"

    @property
    def scores_per_token(self) -> int:
        return self.vocab_size

    @property
    def multiply_adds(self) -> int:
        return self.vocab_size * self.embed_dim

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(self.scaled(features), self.weight, self.logit_bias)

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        context = self.scaled(rows(features, features.shape[:-1], index))
        return softmax_loss(context, self.weight, self.logit_bias, target, smoothing, self.vocabulary_mask)
