"""The elementwise operations of the fused losses, and which module has them for a device.

Shapes: n tokens of a chunk, K components, V vocabulary, S frequent tokens.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from mixtape_plugin.kernels import torch_ops
from mixtape_plugin.kernels.curves import Curve


class Elementwise(Protocol):
    """What :mod:`~mixtape_plugin.kernels.torch_ops` and :mod:`~mixtape_plugin.kernels.triton_ops` both provide.

    Whatever is as large as scores is changed in place; results of one value a token are in float32 or better. Losses
    are in nats. A gradient of scores is ``scale`` times as large as it is, for float16.
    """

    def empty_rows(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory [rows, columns] for a chunk's scores, leaves or gate logits."""

    def softmax_minus_label_(
        self, logits: Tensor, bias: Tensor | None, target: Tensor, target_weight: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """logits [n, V] become scale · (softmax(logits + bias) − target_weight · onehot(target)).

        Args:
            bias: [V]; probability is exactly 0 where it is −∞.
            target: [n]

        Returns:
            the negative log-likelihood −log p(target), [n], finite where p underflows and +∞ where bias[target] is −∞;
            and log Σ exp(logits + bias), [n].
        """

    def curve_softmax_minus_label_(
        self,
        logits: Tensor,
        bias: Tensor | None,
        target: Tensor,
        curve: Curve,
        target_weight: float,
        epsilon: float,
        mask: Tensor | None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """logits [n, V] become scale times the gradient in z = logits + bias of target_weight · nll + epsilon · spread,
        p = softmax(f(z)) with a monotone f: f'(z) · (p − target_weight · onehot(target) − epsilon), 0 where masked.

        The curve collects the gradient in f(z), from which the gradients of its own inputs follow.

        Args:
            target_weight, epsilon: target_weight + epsilon · (number of tokens that are not masked) is 1.
            bias: [V], finite.
            target: [n]
            mask: [V], true where the probability is exactly 0, which the spread leaves out.

        Returns:
            nll = −log p(target), [n]; with epsilon > 0, spread = Σ_x −log p(x), [n].
        """

    def mos_smoothing_(
        self,
        logits: Tensor,
        bias: Tensor | None,
        log_prior: Tensor,
        target: Tensor,
        target_weight: float,
        epsilon: float,
        mask: Tensor | None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """logits [n, K, V] become scale times the gradient of target_weight · nll + epsilon · spread of a mixture of
        softmaxes, p(x) = Σ_k π_k p_k(x).

        With every token's posterior R_kx = π_k p_k(x) / p(x), the target's r_k = R_k,target, and ρ_k = Σ_x R_kx, the
        gradient is p_kx (target_weight · r_k + epsilon · ρ_k) − epsilon · R_kx − target_weight · r_k · [x = target].

        Args:
            bias: [V]; probability is exactly 0 where it is −∞.
            log_prior: log π_k, [n, K].
            target: [n]
            mask: [V], true for tokens that the spread leaves out.

        Returns:
            nll = −log p(target), [n]; spread = Σ_x −log p(x), [n]; r, [n, K]; ρ, [n, K]. Where p(target) is 0, nll is
            +∞, and r and what depends on it are finite and may differ from module to module.
        """

    def mix_(self, leaves: Tensor, gates: Tensor, noise: float, out: Tensor) -> None:
        """The sigmoid tree over leaves [K, n, S] with gate logits [K−1, n, S], into out [n, S].

        Node j takes left + right to right + γ_j · (left − right). Left behind for :meth:`mix_backward_`: γ in
        ``gates``, and each node's difference in the slot of its left child (:mod:`~mixtape_plugin.kernels.sigmoid_tree`
        says which that is).

        Args:
            noise: standard deviation of the normal noise that each gate logit gets.
        """

    def mix_backward_(self, leaves: Tensor, gates: Tensor, grad: Tensor) -> None:
        """What :meth:`mix_` left behind becomes the gradients of leaves and gate logits, given that of its result,
        [n, S]."""


@functools.lru_cache(maxsize=None)
def has_triton() -> bool:
    """Whether there is a Triton that the kernels are made for, 3.3 or later."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


def uses_triton(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU (8.0 or newer), and Triton is there."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def elementwise(device: torch.device) -> Elementwise:
    """The module of elementwise operations for this device: Triton's where it :func:`uses_triton`, else torch's."""
    if uses_triton(device):
        from mixtape_plugin.kernels import triton_ops  # imports triton, which need not be there

        return triton_ops
    return torch_ops
