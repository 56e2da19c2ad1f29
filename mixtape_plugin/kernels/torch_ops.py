"""The elementwise operations of the fused losses (:class:`~mixtape_plugin.kernels.dispatch.Elementwise`) in torch, for
any device.

Shapes: n tokens of a chunk, K components, V vocabulary, S frequent tokens.
"""

from __future__ import annotations

import functools
from typing import Iterator

import torch
from torch import Tensor

from mixtape_plugin.kernels.curves import Curve
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.kernels.sigmoid_tree import nodes_bottom_up

# Elements of one tensor that a CPU takes through a sequence of operations together, so that they stay in its caches.
BLOCK = 2**18


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory [rows, columns] for a chunk's scores, leaves or gate logits."""
    return torch.empty(rows, columns, dtype=dtype, device=device)


def row_blocks(tensor: Tensor, elements: int = BLOCK) -> Iterator[slice]:
    """Slices of the rows of a matrix: on a CPU of so many that they hold about as many elements, else of all."""
    rows, columns = tensor.shape
    size = max(rows if tensor.is_cuda else elements // max(columns, 1), 1)
    return (slice(start, start + size) for start in range(0, rows, size))


def log_sum_exp_softmax_(scores: Tensor) -> Tensor:
    """scores [..., V] become softmax(scores); returns log Σ exp, [...]."""
    top = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    # The largest probability is at least 1/V: its logarithm is safe where that of the target's may not be.
    return top - scores.amax(-1).log_()


def softmax_minus_label_(
    logits: Tensor, bias: Tensor | None, target: Tensor, target_weight: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logits [n, V] become scale · (softmax(logits + bias) − target_weight · onehot(target)). Returns nll and
    log Σ exp(logits + bias), [n] each."""
    wide = at_least_float32(logits.dtype)
    nll, log_sum_exps = logits.new_empty(2, len(logits), dtype=wide)
    for rows in row_blocks(logits):
        scores, answer = logits[rows].to(wide), target[rows].unsqueeze(1)  # in place where it is as wide
        if bias is not None:
            scores += bias
        target_score = scores.gather(1, answer).squeeze(1)
        log_sum_exp = log_sum_exp_softmax_(scores)
        nll[rows], log_sum_exps[rows] = log_sum_exp - target_score, log_sum_exp
        scores.scatter_add_(1, answer, scores.new_full(answer.shape, -target_weight))
        if scale != 1:
            scores *= scale
        if wide != logits.dtype:
            logits[rows] = scores
    return nll, log_sum_exps


def curve_softmax_minus_label_(
    logits: Tensor,
    bias: Tensor | None,
    target: Tensor,
    curve: Curve,
    target_weight: float,
    epsilon: float,
    mask: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """logits [n, V] become scale · f'(z) · (softmax(f(z)) − target_weight · onehot(target) − epsilon), z = logits +
    bias. Returns nll and spread, [n] each."""
    wide = at_least_float32(logits.dtype)
    nll, spread = logits.new_zeros(2, len(logits), dtype=wide)
    counted = logits.size(1) if mask is None else logits.size(1) - mask.sum()
    for rows in row_blocks(logits, BLOCK // 2):  # a curve holds several tensors of this size
        scores, answer = logits[rows].to(wide), target[rows].unsqueeze(1)
        if bias is not None:
            scores += bias
        slope, kept = curve.map_(scores)
        if epsilon > 0:
            total = (scores if mask is None else scores.masked_fill(mask, 0.0)).sum(1)
        if mask is not None:
            scores.masked_fill_(mask, -torch.inf)
        target_score = scores.gather(1, answer).squeeze(1)
        log_sum_exp = log_sum_exp_softmax_(scores)
        nll[rows] = log_sum_exp - target_score
        if epsilon > 0:
            spread[rows] = counted * log_sum_exp - total
            scores -= epsilon
        scores.scatter_add_(1, answer, scores.new_full(answer.shape, -target_weight))
        if mask is not None:
            scores.masked_fill_(mask, 0.0)
        curve.collect(scores, kept)
        logits[rows] = scores.mul_(slope if scale == 1 else slope.mul_(scale))
    return nll, spread


def mos_smoothing_(
    logits: Tensor,
    bias: Tensor | None,
    log_prior: Tensor,
    target: Tensor,
    target_weight: float,
    epsilon: float,
    mask: Tensor | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [n, K, V] become scale · (p_kx (target_weight · r_k + epsilon · ρ_k) − epsilon · R_kx
    − target_weight · r_k · [x = target]). Returns nll and spread, [n] each, and r and ρ, [n, K] each."""
    wide = at_least_float32(logits.dtype)
    nll, spread = logits.new_empty(2, len(logits), dtype=wide)
    posterior, rho = logits.new_empty(2, *log_prior.shape, dtype=wide)
    for rows in row_blocks(logits.flatten(1)):
        probs, answer = biased(logits[rows], bias), target[rows].view(-1, 1, 1).expand(-1, logits.size(1), 1)
        target_score = probs.gather(2, answer).squeeze(2)
        log_sum_exp = log_sum_exp_softmax_(probs)
        log_joint = log_prior[rows] + target_score - log_sum_exp
        nll[rows] = -torch.logsumexp(log_joint, 1)
        posterior[rows] = torch.softmax(log_joint.clamp_(min=torch.finfo(wide).min), 1)

        shares = probs * log_prior[rows].exp().unsqueeze(2)  # π_k p_kx
        mixture = shares.sum(1, keepdim=True)
        if mask is not None:
            mixture.masked_fill_(mask, 1.0)
        if not underflows(mixture):
            log_probs, shares = mixture.log(), shares.div_(mixture)
        else:  # in logarithms, at the price of two more exponentials
            shares = biased(logits[rows], bias).add_((log_prior[rows] - log_sum_exp).unsqueeze(2))
            if mask is not None:
                shares.masked_fill_(mask, 0.0)  # a log-sum-exp over nothing but −∞ has no posterior
            log_probs = torch.logsumexp(shares, 1, keepdim=True)
            shares.sub_(log_probs).exp_()
        if mask is not None:
            log_probs.masked_fill_(mask, 0.0)
            shares.masked_fill_(mask, 0.0)
        spread[rows], rho[rows] = -log_probs.sum(2).squeeze(1), shares.sum(2)
        probs *= (target_weight * posterior[rows] + epsilon * rho[rows]).unsqueeze(2)
        probs.sub_(shares, alpha=epsilon)
        probs.scatter_add_(2, answer, -target_weight * posterior[rows].unsqueeze(2))
        logits[rows] = probs.mul_(scale) if scale != 1 else probs
    return nll, spread, posterior, rho


def log_mixture_(logits: Tensor, bias: Tensor, log_prior: Tensor, out: Tensor) -> None:
    """log Σ_k π_k softmax_x(logits + bias), into out [n, V], from logits [n, K, V], which may change, bias [V], and
    log π_k [n, K]."""
    mask = bias.isneginf()
    for rows in row_blocks(logits.flatten(1)):
        if not logits.is_cuda:  # which would have to wait for the answer
            probs = biased(logits[rows], bias)
            mixture = torch.softmax(probs, 2, out=probs).mul_(log_prior[rows].exp().unsqueeze(2)).sum(1)
            del probs  # before the next block has its own
            if not underflows(mixture.masked_fill(mask, 1.0)):
                torch.log(mixture, out=out[rows])
                continue
        scores = logits[rows].to(out.dtype).add_(bias)
        scores += (log_prior[rows] - torch.logsumexp(scores, 2)).unsqueeze(2)
        torch.logsumexp(scores, 1, out=out[rows])


def underflows(mixture: Tensor) -> bool:
    """Whether any of these sums of probabilities is no number, or so small that its summands lost digits."""
    limits = torch.finfo(mixture.dtype)
    return not bool(mixture.amin() >= limits.tiny / limits.eps)


def biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    """logits + bias, in float32 or better, elsewhere."""
    scores = logits.to(at_least_float32(logits.dtype), copy=True)
    return scores if bias is None else scores.add_(bias)


@functools.lru_cache(maxsize=None)
def normal_quantiles(dtype: torch.dtype) -> Tensor:
    """The standard normal distribution's, at the middles of 2^16 equal parts of (0, 1)."""
    middles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(middles).to(dtype)


def add_normal_noise_(values: Tensor, noise: float) -> None:
    """values += noise · a standard normal number each.

    On a CPU it is one of 2^16 equally likely ones, of which 64 random bits make four: in bfloat16 that takes two fifths
    of the time of torch's own, in float32 half. Their variance is less than 1 by 2e-5.
    """
    if values.device.type != "cpu":
        values.add_(torch.randn_like(values), alpha=noise)
        return
    bits = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    index = bits.view(torch.int16)[: values.numel()].to(torch.int32).add_(2**15)
    numbers = normal_quantiles(values.dtype).index_select(0, index).view_as(values)
    values.add_(numbers, alpha=noise)


def mix_(leaves: Tensor, gates: Tensor, noise: float, out: Tensor) -> None:
    """The sigmoid tree over leaves [K, n, S] with gate logits [K−1, n, S], into out [n, S]; γ stays in ``gates``,
    left − right in the slot of each left child."""
    nodes = nodes_bottom_up(len(leaves))
    for rows in row_blocks(out):
        for node, left, right in nodes:
            gate = gates[node, rows]
            if noise > 0:
                add_normal_noise_(gate, noise)
            gate.sigmoid_()
            difference = leaves[left, rows].sub_(leaves[right, rows])
            value = out[rows] if node == 0 else leaves[right, rows]
            torch.addcmul(leaves[right, rows], gate, difference, out=value)


def mix_backward_(leaves: Tensor, gates: Tensor, grad: Tensor) -> None:
    """What :func:`mix_` left behind becomes the gradients of leaves and gate logits, given that of its result."""
    nodes = nodes_bottom_up(len(leaves))[::-1]
    for rows in row_blocks(grad):
        for node, left, right in nodes:
            upper = grad[rows] if node == 0 else leaves[right, rows]
            gate, difference = gates[node, rows], leaves[left, rows]
            to_left = upper * gate
            difference.mul_(to_left)  # G · γ · (left − right), and the logit's gradient is 1 − γ times that
            torch.addcmul(difference, difference, gate, value=-1, out=gate)
            torch.sub(upper, to_left, out=leaves[right, rows])
            difference.copy_(to_left)
