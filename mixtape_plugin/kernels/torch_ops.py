"""Elementwise operations of the fused losses in torch, for any device.

Shapes: n tokens of a chunk, K components, V vocabulary, S frequent tokens. Whatever is as large as scores is changed in
place; results of one value a token are in float32 or better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixtape_plugin.kernels.common import at_least_float32

# Elements of one tensor that are taken through a sequence of operations together, so that they stay in the caches.
BLOCK = 2**18


def score_buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory [rows, columns] for a chunk's scores."""
    return torch.empty(rows, columns, dtype=dtype, device=device)


def log_sum_exp_softmax_(scores: Tensor) -> Tensor:
    """scores [..., V] become softmax(scores); returns log Σ exp, [...]."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    # The largest probability is at least 1/V: its logarithm is safe where that of the target's may not be.
    return top - scores.amax(-1).log_()


def softmax_minus_label_(logits: Tensor, bias: Tensor | None, target: Tensor, target_weight: float, scale: float = 1.0):
    """logits [n, V] become scale · (softmax(logits + bias) − target_weight · onehot(target)).

    Returns:
        the negative log-likelihood −log p(target), [n], and log Σ exp(logits + bias), [n].
    """
    scores = logits if logits.dtype == at_least_float32(logits.dtype) else logits.float()
    if bias is not None:
        scores += bias
    target = target.unsqueeze(1)
    target_score = scores.gather(1, target).squeeze(1)
    log_sum_exp = log_sum_exp_softmax_(scores)
    scores.scatter_add_(1, target, scores.new_full(target.shape, -target_weight))
    if scale != 1:
        scores *= scale
    if scores is not logits:
        logits.copy_(scores)
    return log_sum_exp - target_score, log_sum_exp


def mos_smoothing_(
    logits: Tensor,
    bias: Tensor | None,
    log_prior: Tensor,
    target: Tensor,
    target_weight: float,
    epsilon: float,
    mask: Tensor | None,
    scale: float = 1.0,
):
    """logits [n, K, V] become scale times the gradient of target_weight · nll + epsilon · spread, for a mixture of
    softmaxes, nll = −log p(target) and spread = Σ_x −log p(x) over the tokens that are not masked.

    With the posteriors r_k of the target and R_kx of every token, and ρ_k = Σ_x R_kx, the gradient is
    p_kx (target_weight · r_k + epsilon · ρ_k) − epsilon · R_kx − target_weight · r_k · [x = target].

    Returns:
        nll [n], spread [n], r [n, K], ρ [n, K].
    """
    scores = logits.to(at_least_float32(logits.dtype), copy=True)
    if bias is not None:
        scores += bias
    target = target.view(-1, 1, 1).expand(-1, scores.size(1), 1)
    target_score = scores.gather(2, target).squeeze(2)
    probs = scores.clone()
    log_sum_exp = log_sum_exp_softmax_(probs)
    log_joint = log_prior + target_score - log_sum_exp
    log_target = torch.logsumexp(log_joint, 1)
    posterior = torch.softmax(log_joint.clamp_(min=torch.finfo(log_joint.dtype).min), 1)

    scores += (log_prior - log_sum_exp).unsqueeze(2)  # log π_k p_kx
    if mask is not None:
        scores.masked_fill_(mask, 0.0)  # a log-sum-exp over nothing but −∞ has no posterior
    log_probs = torch.logsumexp(scores, 1)
    shares = scores.sub_(log_probs.unsqueeze(1)).exp_()
    if mask is not None:
        log_probs.masked_fill_(mask, 0.0)
        shares.masked_fill_(mask, 0.0)
    rho = shares.sum(2)
    probs *= (target_weight * posterior + epsilon * rho).unsqueeze(2)
    probs.sub_(shares, alpha=epsilon)
    probs.scatter_add_(2, target, -target_weight * posterior.unsqueeze(2))
    logits.copy_(probs.mul_(scale))
    return -log_target, -log_probs.sum(1), posterior, rho


def slots(num_components: int) -> list:
    """For each node of the sigmoid tree, the slots that hold the values of its left and right child: each subtree's
    value lies in the slot of its rightmost leaf."""
    num_gates = num_components - 1
    leaf = iter(range(num_components))
    pairs = [None] * num_gates

    def rightmost(node: int) -> int:
        if node >= num_gates:
            return next(leaf)
        left = rightmost(2 * node + 1)
        right = rightmost(2 * node + 2)
        pairs[node] = left, right
        return right

    rightmost(0)
    return pairs


def row_blocks(rows: int, row_length: int):
    """Slices of so many rows that they hold about :data:`BLOCK` elements."""
    size = max(BLOCK // max(row_length, 1), 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def mix_(leaves: Tensor, gates: Tensor, noise: float, out: Tensor) -> None:
    """The sigmoid tree over leaves [K, n, S] with gate logits [K−1, n, S], into out [n, S].

    Node j takes left + right to right + γ_j · (left − right). Left behind for :func:`mix_backward_`: γ in ``gates``,
    and each node's difference in the slot of its left child.

    Args:
        noise: standard deviation of the normal noise that each gate logit gets.
    """
    nodes = list(enumerate(slots(len(leaves))))[::-1]
    for rows in row_blocks(*out.shape):
        for node, (left, right) in nodes:
            gate = gates[node, rows]
            if noise > 0:
                gate.add_(torch.randn_like(gate), alpha=noise)
            gate.sigmoid_()
            difference = leaves[left, rows].sub_(leaves[right, rows])
            value = out[rows] if node == 0 else leaves[right, rows]
            torch.addcmul(leaves[right, rows], gate, difference, out=value)


def mix_backward_(leaves: Tensor, gates: Tensor, grad: Tensor) -> None:
    """What :func:`mix_` left behind becomes the gradients of leaves and gate logits, given that of its result."""
    nodes = list(enumerate(slots(len(leaves))))
    for rows in row_blocks(*grad.shape):
        for node, (left, right) in nodes:
            upper = grad[rows] if node == 0 else leaves[right, rows]
            gate, difference = gates[node, rows], leaves[left, rows]
            to_left = upper * gate
            difference.mul_(to_left)  # G · γ · (left − right), and the logit's gradient is 1 − γ times that
            torch.addcmul(difference, difference, gate, value=-1, out=gate)
            torch.sub(upper, to_left, out=leaves[right, rows])
            difference.copy_(to_left)
