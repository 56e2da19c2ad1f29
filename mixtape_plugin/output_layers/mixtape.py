"""Mixtape (Yang et al. 2019): a mixture in logit space with gates of its own for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixtape_plugin.errors import UserError
from mixtape_plugin.kernels.common import Smoothing
from mixtape_plugin.kernels.mixtape import mixtape_loss, mixtape_scores
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.kernels.sigmoid_tree import nodes_bottom_up
from mixtape_plugin.output_layers.base import rows
from mixtape_plugin.output_layers.config import OutputLayerConfig
from mixtape_plugin.output_layers.mixture import MixtureLayer

if TYPE_CHECKING:
    from fairseq.data import Dictionary


def sigmoid_tree(gates: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """Σ_k π_k leaf_k with the priors π of the sigmoid tree (eq. 3 for K = 4; :mod:`mixtape_plugin.kernels.sigmoid_tree`
    for any K ≥ 2).

    Args:
        gates: the K−1 gates γ, [..., X] each, or [..., 1] to mix whole vectors.
        leaves: the K values to mix, [..., X] each.

    Returns:
        [..., X]
    """
    values = list(leaves)
    for node, left, right in nodes_bottom_up(len(values)):
        values[right] = torch.lerp(values[right], values[left], gates[node])
    return values[-1]


class Mixtape(MixtureLayer):
    """p(x|c) = softmax_x(Σ_k π_{x,k} h_k·w_x + b_x) (eq. 2), h_k = tanh(H_k g) (eq. 5), π the sigmoid tree of eq. 3
    over γ_{x,k} = σ(l_{x,k}), with

    - for the S = round(r·V) most frequent tokens, the first ids of the dictionary,
      l_{x,k} = v_x·tanh(U_k g) + u_k·g + b_{x,k} (eq. 4);
    - for all others l_k = u_k·g (eq. 6), shared: the h_k are mixed first, then multiplied by w_x once.

    Parameters: ``gate_hidden`` U_k, ``gate_embedding`` v_x, ``gate_shared`` u_k, ``gate_bias`` b_{x,k}; H_k, U_k and
    w_x have biases (section 3.4). In training: dropout on h_k and on tanh(U_k g), and normal noise on l, drawn for
    each (context, token, gate) of the frequent tokens and each (context, gate) of the others. ``gate_weight_norm``
    divides each row of U_k by its norm; the constant scale, which the paper does not give, is 1.

    V, and so S, counts the special symbols, too, which stand first in a dictionary: with a small vocabulary S would
    leave gates of their own to no token that can be predicted, and the layer would be a mixture of contexts. That is
    refused; S is not raised, for checkpoints have parameters of its size.

    With a gradient, :meth:`forward` keeps 3·(K−1) tensors [..., S] for the backward pass.

    Raises:
        UserError: K < 2, or none of the first S = round(r·V) tokens can be predicted.
    """

    label = "Mixtape"
    usual_components = 4  # of all experiments of the paper
    token_parameters = ("weight", "bias", "gate_embedding", "gate_bias")
    fixed_options = ("gate_weight_norm",)
    variants = {"no-sharing": {"frequent_ratio": 1.0}}

    def build_parameters(self) -> None:
        super().build_parameters()
        config, vocab_size = self.config, self.vocab_size
        if self.num_components < 2:
            raise UserError(f"--num-components {self.num_components} is too few for --output-layer mixtape: at least 2")
        self.num_frequent = round(config.frequent_ratio * vocab_size)
        first = next((token for token in range(vocab_size) if token not in self.masked_tokens), vocab_size)
        if self.num_frequent <= first:
            raise UserError(
                f"--frequent-ratio {config.frequent_ratio} of {vocab_size} tokens gives gates of their own to the "
                f"first {self.num_frequent}, none of which can be predicted: at least {(first + 1) / vocab_size:.3g}"
            )
        self.num_gates = self.num_components - 1
        self.gate_hidden = nn.Linear(self.feature_dim, self.num_gates * config.gate_dim)
        self.gate_shared = nn.Linear(self.feature_dim, self.num_gates, bias=False)
        self.gate_embedding = nn.Parameter(torch.empty(self.num_frequent, config.gate_dim))
        self.gate_bias = nn.Parameter(torch.zeros(self.num_frequent, self.num_gates))
        nn.init.normal_(self.gate_embedding, std=config.gate_dim**-0.5)

    @property
    def scores_per_token(self) -> int:
        return (self.num_components + self.num_gates) * self.num_frequent + self.vocab_size

    @property
    def multiply_adds(self) -> int:
        contexts = self.num_components * self.feature_dim * self.embed_dim
        gates = self.num_gates * self.config.gate_dim * (self.num_frequent + self.feature_dim)
        scores = (self.vocab_size + self.num_gates * self.num_frequent) * self.embed_dim
        return scores + contexts + gates

    @classmethod
    def check_dictionary(cls, config: OutputLayerConfig, dictionary: Dictionary) -> None:
        """With r < 1 the frequent tokens are the first ids: their counts must be in descending order, those that follow
        no higher, and not all equal."""
        if config.frequent_ratio == 1:
            return
        # Past the frequent ids order does not matter: tasks add symbols there, after the padding with counts of 0.
        counts = dictionary.count[dictionary.nspecial :]
        num_frequent = max(round(config.frequent_ratio * len(dictionary)) - dictionary.nspecial, 1)
        frequent, rare = counts[:num_frequent], counts[num_frequent:]
        if frequent != sorted(frequent, reverse=True) or (frequent and max(rare, default=0) > frequent[-1]):
            problem = "is not ordered by frequency"
        elif len(counts) > 1 and len(set(counts) - {0}) <= 1:
            problem = f"gives every token the same count ({counts[0]})"
        else:
            return
        raise UserError(
            f"--frequent-ratio {config.frequent_ratio} shares the gates of rare tokens, but the dictionary {problem}: "
            "write it with fairseq-preprocess, or use --frequent-ratio 1"
        )

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on gate logits, now."""
        return self.config.gate_noise if self.training else 0.0

    def gate_contexts(self, features: Tensor) -> Tensor:
        """tanh(U_k g) after dropout, [..., K−1, d2]."""
        if self.config.gate_weight_norm:
            weight = self.gate_hidden.weight
            # In float16 the norm of a small row, and what F.normalize divides by at least, are 0.
            weight = F.normalize(weight.to(at_least_float32(weight.dtype)), dim=1).to(weight.dtype)
            hidden = F.linear(features, weight, self.gate_hidden.bias)
        else:
            hidden = self.gate_hidden(features)
        hidden = F.dropout(torch.tanh(hidden), self.config.gate_dropout, self.drops_out)
        return hidden.unflatten(-1, (self.num_gates, self.config.gate_dim))

    def gates(self, features: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The K−1 gates γ of the frequent tokens, [..., S] each, and of all others, [..., 1] each."""
        hidden = self.gate_contexts(features).unbind(-2)
        shared = self.gate_shared(features).split(1, dim=-1)
        # In place: these are the largest tensors there are.
        frequent = [
            F.linear(hidden[k], self.gate_embedding, self.gate_bias[:, k]).add_(shared[k])
            for k in range(self.num_gates)
        ]
        if self.noise > 0:
            frequent = [logit.add_(torch.randn_like(logit), alpha=self.noise) for logit in frequent]
            shared = [logit + self.noise * torch.randn_like(logit) for logit in shared]
        return [logit.sigmoid_() for logit in frequent], [logit.sigmoid() for logit in shared]

    def priors(self, features: Tensor, tokens: Tensor) -> Tensor:
        own = tokens.clamp(max=self.num_frequent - 1).unsqueeze(-1)
        gates = [
            torch.where((tokens < self.num_frequent).unsqueeze(-1), frequent.gather(-1, own), shared)
            for frequent, shared in zip(*self.gates(features))
        ]
        return sigmoid_tree(gates, torch.eye(self.num_components).to(gates[0]).unbind())

    def forward(self, features: Tensor) -> Tensor:
        if self.is_fused_inference:
            leading = features.shape[:-1]
            products = [rows(tensor, leading) for tensor in self.factors(features)]
            scores = mixtape_scores(*products, self.weight, self.gate_weight, self.logit_bias)
            return scores.view(*leading, self.vocab_size)
        contexts = self.context_vectors(features).unbind(-2)
        frequent_gates, shared_gates = self.gates(features)
        frequent_weight, rare_weight = self.weight[: self.num_frequent], self.weight[self.num_frequent :]
        bias = self.logit_bias
        frequent_bias, rare_bias = bias[: self.num_frequent], bias[self.num_frequent :]
        frequent = sigmoid_tree(frequent_gates, [F.linear(h, frequent_weight) for h in contexts]) + frequent_bias
        rare = F.linear(sigmoid_tree(shared_gates, contexts), rare_weight, rare_bias)
        return torch.cat([frequent, rare], dim=-1)

    def fused_loss(
        self, features: Tensor, target: Tensor, index: Tensor | None, smoothing: Smoothing
    ) -> tuple[Tensor, Tensor]:
        factors = [rows(tensor, features.shape[:-1], index) for tensor in self.factors(features)]
        return mixtape_loss(
            *factors, self.weight, self.gate_weight, self.logit_bias, target, self.noise, smoothing,
            self.vocabulary_mask,
        )  # fmt: skip

    def factors(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What scores are products of, for :mod:`mixtape_plugin.kernels.mixtape`: the h_k [..., K, E], the priors that
        the rare tokens share, [..., K], and [..., K−1, d2 + K], which times :attr:`gate_weight` are gate logits.
        """
        contexts, hidden = self.context_vectors(features), self.gate_contexts(features)
        shared = self.gate_shared(features)
        one_of_k = torch.eye(self.num_gates, dtype=hidden.dtype, device=hidden.device).expand(*shared.shape, -1)
        gate_contexts = torch.cat([hidden, shared.unsqueeze(-1), one_of_k], dim=-1)
        if self.noise > 0:
            shared = shared + self.noise * torch.randn_like(shared)
        components = torch.eye(self.num_components, dtype=shared.dtype, device=shared.device)
        prior = sigmoid_tree(shared.sigmoid().split(1, dim=-1), components.unbind())
        return contexts, prior, gate_contexts

    @property
    def gate_weight(self) -> Tensor:
        """v_x, and 1 and b_{x,k}, which make u_k·g and the bias of eq. 4 a part of the product, [S, d2 + K]."""
        ones = self.gate_embedding.new_ones(self.num_frequent, 1)
        return torch.cat([self.gate_embedding, ones, self.gate_bias], dim=1)
