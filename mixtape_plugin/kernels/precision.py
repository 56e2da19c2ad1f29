"""In which types the fused losses multiply, add up and hold gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which log-sum-exps are taken: float32, or float64 for float64 input."""
    return torch.promote_types(dtype, torch.float32)


def score_bytes(dtype: torch.dtype) -> int:
    """Bytes that a score takes while its softmax is computed."""
    return torch.finfo(at_least_float32(dtype)).bits // 8


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type of the matrix products: autocast's where it is on, else the tensor's own."""
    return autocast_dtype(tensor) or tensor.dtype


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast gives a tensor in matrix products; None where it is off, or leaves the tensor alone."""
    device = tensor.device.type
    if tensor.dtype == torch.float64:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cuda":  # older torch has a function for each device
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


def gradient_scale(dtype: torch.dtype) -> float:
    """By how much gradients of scores are multiplied while they are held: float16 would round small ones to 0."""
    return 256.0 if dtype == torch.float16 else 1.0
