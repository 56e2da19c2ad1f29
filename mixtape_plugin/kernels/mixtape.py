"""The fused loss of Mixtape.

Shapes: N tokens, n of a chunk, K components, E embedding, V vocabulary, S frequent tokens, d width of the gates'
contexts (d2 + K: the gate embedding's, then the shared logit and K−1 columns for the biases, which makes both a part of
the product).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mixtape_plugin.kernels.common import FusedLoss, Smoothing, chunks, longest
from mixtape_plugin.kernels.dispatch import elementwise
from mixtape_plugin.kernels.precision import compute_dtype


class Parts(NamedTuple):
    """What the scores of one chunk were made of."""

    contexts: Tensor  # [n·K, E]
    gate_contexts: Tensor  # [n·(K−1), d]
    leaves: Tensor  # [n·K, S], and
    gates: Tensor  # [n·(K−1), S]: what mix_ leaves behind
    rare_context: Tensor  # Σ_k π_k h_k of the rare tokens, [n, E]


class ScoreWriter:
    """Writes the scores of one chunk of tokens after the other, in buffers that all of them share.

    Args:
        num_tokens: of all chunks; ``slices`` are the chunks.
        dtype: of the matrix products.
    """

    def __init__(
        self,
        num_tokens: int,
        num_components: int,
        weight: Tensor,
        gate_weight: Tensor,
        dtype: torch.dtype,
        noise: float,
    ):
        self.ops = elementwise(weight.device)
        self.noise = noise
        num_frequent, num_gates = len(gate_weight), num_components - 1
        self.frequent, self.rare = weight.to(dtype).split([num_frequent, len(weight) - num_frequent])
        self.gate_matrix = gate_weight.to(dtype)
        values = len(weight) + (num_components + num_gates) * num_frequent
        self.slices = chunks(num_tokens, values, dtype, weight.device)
        size, place = longest(self.slices), {"dtype": dtype, "device": weight.device}
        self.leaves = self.ops.empty_rows(num_components * size, num_frequent, **place)
        self.gates = self.ops.empty_rows(num_gates * size, num_frequent, **place)

    def __call__(self, contexts: Tensor, prior: Tensor, gate_contexts: Tensor, scores: Tensor) -> Parts:
        """Scores of n tokens but for the bias, into ``scores`` [n, V]; returns their :class:`Parts`."""
        n, num_frequent = len(scores), len(self.frequent)
        rare_context = (prior.unsqueeze(2) * contexts).sum(1)
        contexts, gate_contexts = contexts.flatten(0, 1), gate_contexts.flatten(0, 1)
        leaves = torch.mm(contexts, self.frequent.t(), out=self.leaves[: len(contexts)])
        gates = torch.mm(gate_contexts, self.gate_matrix.t(), out=self.gates[: len(gate_contexts)])
        self.ops.mix_(by_component(leaves, n), by_component(gates, n), self.noise, scores[:, :num_frequent])
        torch.mm(rare_context, self.rare.t(), out=scores[:, num_frequent:])
        return Parts(contexts, gate_contexts, leaves, gates, rare_context)


def by_component(matrix: Tensor, n: int) -> Tensor:
    """[n·k, S] as [k, n, S]."""
    return matrix.unflatten(0, (n, -1)).transpose(0, 1)


@torch.no_grad()
def mixtape_scores(
    contexts: Tensor,
    prior: Tensor,
    gate_contexts: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Scores [N, V] of Mixtape, for inference: arguments as of :func:`mixtape_loss`."""
    dtype = compute_dtype(contexts)
    contexts, prior, gate_contexts = (tensor.to(dtype) for tensor in (contexts, prior, gate_contexts))
    with torch.autocast(contexts.device.type, enabled=False):
        write = ScoreWriter(len(contexts), contexts.size(1), weight, gate_weight, dtype, noise=0.0)
        scores = contexts.new_empty(len(contexts), len(weight))
        for rows in write.slices:
            write(contexts[rows], prior[rows], gate_contexts[rows], scores[rows])
        return scores.add_(bias) if scores.dtype == bias.dtype else scores + bias


def mixtape_loss(
    contexts: Tensor,
    prior: Tensor,
    gate_contexts: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    bias: Tensor,
    target: Tensor,
    noise: float,
    smoothing: Smoothing,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross entropy of Mixtape (eq. 2 to 6), and its negative log-likelihood, summed, in nats.

    Args:
        contexts: h_k, [N, K, E].
        prior: π of the rare tokens, which share it, [N, K].
        gate_contexts: [N, K−1, d]; times ``gate_weight`` they are the gate logits.
        weight: w_x, [V, E].
        gate_weight: [S, d]; its column d2 is ones.
        bias: b_x, [V]; −∞ where a token cannot be predicted.
        target: [N].
        noise: standard deviation of the noise on the frequent tokens' gate logits, drawn chunk by chunk.
        mask: [V], true where bias is −∞.
    """
    dtype = compute_dtype(contexts)
    contexts, prior, gate_contexts = (tensor.to(dtype) for tensor in (contexts, prior, gate_contexts))
    return MixtapeLoss(target, smoothing, mask, noise).loss_and_nll(
        contexts=contexts, prior=prior, gate_contexts=gate_contexts, weight=weight, gate_weight=gate_weight, bias=bias
    )


class MixtapeLoss(FusedLoss):
    """:func:`mixtape_loss`. Scores of the S frequent tokens are mixed; those of the others, which share their priors,
    come from mixed contexts."""

    def __init__(self, target: Tensor, smoothing: Smoothing, mask: Tensor | None, noise: float):
        super().__init__(target, smoothing, mask)
        self.noise = noise

    def begin(
        self, contexts: Tensor, prior: Tensor, gate_contexts: Tensor, weight: Tensor, gate_weight: Tensor, bias: Tensor
    ) -> list:
        self.contexts, self.prior, self.gate_contexts, self.bias = contexts, prior, gate_contexts, bias.to(self.wide)
        self.write = ScoreWriter(len(self.target), contexts.size(1), weight, gate_weight, self.dtype, self.noise)
        self.num_frequent = len(gate_weight)
        self.bias_sum = (self.bias if self.mask is None else self.bias.masked_fill(self.mask, 0.0)).sum()
        self.buffer = self.ops.empty_rows(longest(self.write.slices), len(weight), self.dtype, weight.device)
        return self.write.slices

    def add_chunk(self, rows: slice) -> None:
        scores = self.buffer[: rows.stop - rows.start]  # [n, V]
        parts = self.write(self.contexts[rows], self.prior[rows], self.gate_contexts[rows], scores)
        self.differentiate(scores, self.target[rows])
        if self.needs_gradient:
            self.add_rows("bias", scores)
            self.add_frequent(rows, scores[:, : self.num_frequent], parts)
            self.add_rare(rows, scores[:, self.num_frequent :], parts.rare_context)

    def differentiate(self, scores: Tensor, target: Tensor) -> None:
        """scores [n, V] become their own gradient. With label smoothing spread = V·logsumexp(z) − Σ_x z_x."""
        epsilon = self.smoothing.epsilon
        if epsilon > 0:
            if self.mask is not None:
                scores.masked_fill_(self.mask, 0.0)
            self.spread -= scores.sum(dtype=self.wide) + len(scores) * self.bias_sum
        self.softmax_minus_label_(scores, target)
        if epsilon > 0:
            scores -= self.scale * epsilon
            if self.mask is not None:
                scores.masked_fill_(self.mask, 0.0)

    def add_frequent(self, rows: slice, scores: Tensor, parts: Parts) -> None:
        """What follows from the gradients of the frequent tokens' scores, [n, S]."""
        leaves, gates = parts.leaves, parts.gates
        self.ops.mix_backward_(by_component(leaves, len(scores)), by_component(gates, len(scores)), scores)
        self.add_product("weight", leaves.t(), parts.contexts, slice(self.num_frequent))
        self.add_product("gate_weight", gates.t(), parts.gate_contexts)
        self.add_product("contexts", leaves, self.write.frequent, rows)
        self.add_product("gate_contexts", gates, self.write.gate_matrix, rows)
        self.sum_shared(rows, gates.unflatten(0, (len(scores), -1)))

    def add_rare(self, rows: slice, scores: Tensor, context: Tensor) -> None:
        """What follows from the gradients of the rare tokens' scores, [n, V−S], and their context Σ_k π_k h_k."""
        self.add_product("weight", scores.t(), context, slice(self.num_frequent, None))
        if self.grad["contexts"] is None and self.grad["prior"] is None:
            return
        grad = (scores @ self.write.rare).to(self.wide).unsqueeze(1) / self.scale  # [n, 1, E]
        if self.grad["contexts"] is not None:
            self.grad["contexts"][rows].addcmul_(self.prior[rows].to(self.wide).unsqueeze(2), grad)
        if self.grad["prior"] is not None:
            self.grad["prior"][rows] = (self.contexts[rows].to(self.wide) * grad).sum(2)

    def sum_shared(self, rows: slice, gates: Tensor) -> None:
        """The gradient of the shared logits u_k·g is the sum of those of the S gate logits, ``gates`` [n, K−1, S].

        The product above has it, too, but as a chain of S additions in a row, whose rounding errors add up; ``sum``
        goes in pairs.
        """
        total = self.grad["gate_contexts"]
        if total is not None:
            total[rows, :, -1 - gates.size(1)] = gates.sum(2, dtype=self.wide) / self.scale
