"""The fused loss of Mixtape."""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.kernels.common import Gradients, Smoothing, add_product_, chunks, gradient_in_forward, longest
from mixtape_plugin.kernels.dispatch import elementwise
from mixtape_plugin.kernels.precision import at_least_float32, compute_dtype, gradient_scale, score_bytes


class ChunkScores:
    """Writes the scores of one chunk of tokens after the other, in buffers that all of them share.

    Args:
        num_tokens: of all chunks; ``slices`` are the chunks.
        dtype: of the matrix products.
    """

    def __init__(self, num_tokens, num_components, weight, gate_weight, dtype, noise):
        self.ops = elementwise(weight.device)
        self.noise = noise
        num_frequent, num_gates = len(gate_weight), num_components - 1
        self.frequent, self.rare = weight.to(dtype).split([num_frequent, len(weight) - num_frequent])
        self.gate_matrix = gate_weight.to(dtype)
        values = len(weight) + (num_components + num_gates) * num_frequent
        self.slices = chunks(num_tokens, values * score_bytes(dtype))
        size, place = longest(self.slices), {"dtype": dtype, "device": weight.device}
        self.leaves = self.ops.score_buffer(num_components * size, num_frequent, **place)
        self.gates = self.ops.score_buffer(num_gates * size, num_frequent, **place)

    def __call__(self, contexts: Tensor, prior: Tensor, gate_contexts: Tensor, scores: Tensor):
        """Scores of n tokens but for the bias, into ``scores`` [n, V].

        Returns:
            contexts [K·n, E] and gate_contexts [(K−1)·n, d], component by component, so that the scores of each are
            one block; what :func:`mix_` leaves of those, leaves [K, n, S] and gates [K−1, n, S]; and the context of
            the rare tokens, [n, E].
        """
        n, num_frequent = len(scores), len(self.frequent)
        rare_context = (prior.unsqueeze(2) * contexts).sum(1)
        contexts = contexts.transpose(0, 1).flatten(0, 1)
        gate_contexts = gate_contexts.transpose(0, 1).flatten(0, 1)
        leaves = torch.mm(contexts, self.frequent.t(), out=self.leaves[: len(contexts)]).view(-1, n, num_frequent)
        gates = torch.mm(gate_contexts, self.gate_matrix.t(), out=self.gates[: len(gate_contexts)])
        gates = gates.view(-1, n, num_frequent)
        self.ops.mix_(leaves, gates, self.noise, scores[:, :num_frequent])
        torch.mm(rare_context, self.rare.t(), out=scores[:, num_frequent:])
        return contexts, gate_contexts, leaves, gates, rare_context


@torch.no_grad()
def mixtape_scores(
    contexts: Tensor,
    prior: Tensor,
    gate_contexts: Tensor,
    weight: Tensor,
    gate_weight: Tensor,
    bias: Tensor,
    noise: float = 0.0,
):
    """Scores [N, V] of Mixtape, for inference: arguments as of :func:`mixtape_loss`."""
    dtype = compute_dtype(contexts)
    contexts, prior, gate_contexts = (tensor.to(dtype) for tensor in (contexts, prior, gate_contexts))
    with torch.autocast(contexts.device.type, enabled=False):
        score = ChunkScores(len(contexts), contexts.size(1), weight, gate_weight, dtype, noise)
        scores = contexts.new_empty(len(contexts), len(weight))
        for rows in score.slices:
            score(contexts[rows], prior[rows], gate_contexts[rows], scores[rows])
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
):
    """Label-smoothed cross entropy of Mixtape (eq. 2 to 6), and its negative log-likelihood, summed, in nats.

    Scores of the S frequent tokens are mixed; those of the others, which share their priors, come from mixed contexts.

    Args:
        contexts: h_k, [N, K, E].
        prior: π of the rare tokens, which share it, [N, K].
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
    contexts, prior, gate_contexts = (tensor.to(dtype) for tensor in (contexts, prior, gate_contexts))

    def compute(needed, contexts, prior, gate_contexts, weight, gate_weight, bias):
        ops = elementwise(contexts.device)
        wide = at_least_float32(dtype)
        scale = gradient_scale(dtype)
        gradients = Gradients(
            needed, contexts=contexts, prior=prior, gate_contexts=gate_contexts, weight=weight,
            gate_weight=gate_weight, bias=bias,
        )  # fmt: skip
        score = ChunkScores(len(target), num_components, weight, gate_weight, dtype, noise)
        num_frequent, offset = len(gate_weight), bias.to(wide)
        score_buffer = ops.score_buffer(longest(score.slices), len(weight), dtype, contexts.device)
        nll = torch.zeros((), dtype=wide, device=contexts.device)
        spread = torch.zeros_like(nll)
        allowed_bias = offset if mask is None else offset.masked_fill(mask, 0.0)
        for rows in score.slices:
            scores = score_buffer[: rows.stop - rows.start]
            frequent_scores, rare_scores = scores[:, :num_frequent], scores[:, num_frequent:]
            context, gate_context, leaves, gates, rare_context = score(
                contexts[rows], prior[rows], gate_contexts[rows], scores
            )
            if smoothing.epsilon > 0:
                if mask is not None:
                    scores.masked_fill_(mask, 0.0)
                spread -= scores.sum(dtype=wide) + len(scores) * allowed_bias.sum()
            chunk_nll, log_sum_exp = ops.softmax_minus_label_(
                scores, offset, target[rows], smoothing.target_weight, scale
            )
            nll += chunk_nll.sum()
            if smoothing.epsilon > 0:
                spread += smoothing.vocab_size * log_sum_exp.sum()
                scores -= scale * smoothing.epsilon
                if mask is not None:
                    scores.masked_fill_(mask, 0.0)
            if not any(needed):
                continue
            if gradients.bias is not None:
                gradients.bias.add_(scores.sum(0, dtype=wide), alpha=1 / scale)
            if gradients.contexts is not None or gradients.prior is not None:
                grad_rare = (rare_scores @ score.rare).to(wide).unsqueeze(1) / scale
            ops.mix_backward_(leaves, gates, frequent_scores)
            leaves, gates = leaves.flatten(0, 1), gates.flatten(0, 1)
            if gradients.weight is not None:
                add_product_(gradients.weight[num_frequent:], rare_scores.t(), rare_context, 1 / scale)
                add_product_(gradients.weight[:num_frequent], leaves.t(), context, 1 / scale)
            if gradients.contexts is not None:
                add_transposed(gradients.contexts[rows], leaves, score.frequent, 1 / scale)
                gradients.contexts[rows].addcmul_(prior[rows].to(wide).unsqueeze(2), grad_rare)
            if gradients.prior is not None:
                gradients.prior[rows] = (contexts[rows].to(wide) * grad_rare).sum(2)
            if gradients.gate_weight is not None:
                add_product_(gradients.gate_weight, gates.t(), gate_context, 1 / scale)
            if gradients.gate_contexts is not None:
                add_transposed(gradients.gate_contexts[rows], gates, score.gate_matrix, 1 / scale)
        return nll, spread, gradients.all()

    return gradient_in_forward(compute, smoothing, contexts, prior, gate_contexts, weight, gate_weight, bias)


def add_transposed(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """total [n, k, e] += alpha · left [k·n, s] @ right [s, e]."""
    n, k, e = total.shape
    total.add_((left @ right).view(k, n, e).transpose(0, 1), alpha=alpha)
