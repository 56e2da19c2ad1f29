"""Rank of a matrix of log-probabilities: what the softmax bottleneck bounds (Yang et al. 2018, appendix C)."""

from __future__ import annotations

import torch
from torch import Tensor


def singular_values(log_probs: Tensor) -> Tensor:
    """Singular values of log P [N, V], descending, computed in float64."""
    return torch.linalg.svdvals(log_probs.double())


def log_prob_rank(log_probs: Tensor) -> int:
    """Number of singular values above ½·√(N+V+1)·σ_max·ε, ε of float32 (Press et al. 2007, section 2.6.2).

    A softmax over E-wide embeddings with a bias gives at most E + 2: E for H·Wᵀ, one for the bias and one for the
    normalisation of each row.

    Args:
        log_probs: [N, V] in nats, contexts by tokens, finite.
    """
    sigma = singular_values(log_probs)
    threshold = 0.5 * (sum(log_probs.shape) + 1) ** 0.5 * sigma.max() * torch.finfo(torch.float32).eps
    return int((sigma > threshold).sum())
