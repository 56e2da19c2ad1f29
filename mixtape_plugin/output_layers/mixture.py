"""What the mixtures share: K context vectors, and the prior of those that have one for all tokens.

Shapes: ``...`` any leading dimensions (fairseq: B batch, T time), D features, E embedding, K components.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixtape_plugin.modules.locked_dropout import locked_dropout
from mixtape_plugin.output_layers.base import OutputLayer


class MixtureLayer(OutputLayer):
    """An output layer over K context vectors h_k = α·tanh(H_k g + b_k) (Mixtape eq. 5, where α = 1; MoS calls H_k
    W_{h,k})."""

    has_components = True
    has_projection = True

    def build_parameters(self) -> None:
        self.num_components = self.config.num_components
        self.context = nn.Linear(self.feature_dim, self.num_components * self.embed_dim)

    @property
    def has_locked_dropout(self) -> bool:
        return self.drops_out and self.config.locked_context_dropout and self.config.context_dropout > 0

    def priors(self, features: Tensor, tokens: Tensor) -> Tensor:
        """π_k, of one token x for each context, [..., K], for analyses; in the layers where x matters π_{x,k}.

        Args:
            features: [..., D]
            tokens: x, [...]
        """
        raise NotImplementedError

    def context_vectors(self, features: Tensor) -> Tensor:
        """h_k after dropout, [..., K, E]."""
        contexts = self.scaled(torch.tanh(self.context(features)))
        if self.config.locked_context_dropout:
            contexts = locked_dropout(contexts, self.config.context_dropout, self.drops_out)
        else:
            contexts = F.dropout(contexts, self.config.context_dropout, self.drops_out)
        return contexts.unflatten(-1, (self.num_components, self.embed_dim))


class SharedPriorLayer(MixtureLayer):
    """A mixture whose prior is the same for all tokens, π = softmax(W_π g) (MoS, section 2.4, without a bias)."""

    def build_parameters(self) -> None:
        super().build_parameters()
        self.prior = nn.Linear(self.feature_dim, self.num_components, bias=False)

    def priors(self, features: Tensor, tokens: Tensor | None = None) -> Tensor:
        return torch.softmax(self.prior(features), dim=-1)
