"""Dropout with one mask for all time steps of a sequence (Gal and Ghahramani 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zeroes elements of ``x`` with probability ``p`` and scales the rest by 1/(1−p), the same ones at each step.

    Args:
        x: [B, T, ...].

    Raises:
        ValueError: ``x`` has no batch, time and feature dimensions.
    """
    if not training or p == 0:
        return x
    if x.dim() < 3:
        raise ValueError(f"locked dropout needs [batch, time, features], not {x.dim()} dimensions")
    mask = F.dropout(x.new_ones(x.size(0), 1, *x.shape[2:]), p)
    return x * mask
