"""Monotone maps f of scores before a softmax, p = softmax(f(z)).

Shapes: n tokens of a block, V vocabulary, K pieces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Curve:
    """A monotone map f, the same for every score. A subclass has :meth:`value`; a faster :meth:`map_` is up to it.

    A fused loss, for which one is made anew, calls :meth:`begin`, for each block of scores :meth:`map_` and
    :meth:`collect`, and :meth:`gradients` at the end.
    """

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All tensors that f depends on and that may get gradients, by name; what is not named gets none."""
        return {}

    def value(self, scores: Tensor) -> Tensor:
        """f(z) of scores in float32 or better, for torch to differentiate; z is finite."""
        raise NotImplementedError

    def begin(self, dtype: torch.dtype, needed: bool) -> None:
        """Before the first block.

        Args:
            dtype: of the scores.
            needed: whether an input needs its gradient.
        """

    def map_(self, scores: Tensor) -> tuple[Tensor, Any]:
        """scores become f(scores); returns f'(scores) and what :meth:`collect` wants of them."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = scores.clone().requires_grad_()
            value = self.value(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        scores.copy_(value.detach())
        return slope, None

    def collect(self, grad: Tensor, kept: Any) -> None:
        """Takes the gradient of the loss in f(z), of the block that :meth:`map_` gave ``kept`` for."""

    def gradients(self) -> dict[str, Tensor]:
        """The gradients in :attr:`inputs`, after the last block."""
        return {}


class GeneralizedSigSoftmax(Curve):
    """f(z) = z − (k−1)·softplus(c−z) (Parthiban et al. 2021, eq. 3 with k(z−c) + c taken together, which does not
    overflow), f'(z) = 1 + (k−1)·σ(c−z). k = 1 is a softmax, (c, k) = (0, 2) SigSoftmax, f = z + log σ(z)."""

    def __init__(self, c: float, k: float):
        self.c, self.k = c, k

    def value(self, scores: Tensor) -> Tensor:
        return scores + (self.k - 1) * F.logsigmoid(scores - self.c)  # softplus has a threshold in torch, this has none

    def map_(self, scores: Tensor) -> tuple[Tensor, Any]:
        log_sigmoid = F.logsigmoid(scores - self.c)
        scores.add_(log_sigmoid, alpha=self.k - 1)
        return log_sigmoid.exp_().mul_(1 - self.k).add_(self.k), None


class PiecewiseLinear(Curve):
    """A continuous f of K pieces over [−T, T], δ = 2T/K wide each, with slopes s; the end pieces go on beyond ±T.

    u = (z + T)/δ, i = floor(u) within [0, K), r = u − i: f = C_i + δ·r·s_i, C_i = δ·(Σ_{j<i} s_j − Σ_{j<K/2} s_j), so
    that values stay small and, for an even K, f(0) = 0. C is summed in float64.

    With B_j = Σ_{i=j} dF and A_j = Σ_{i=j} dF·r over all scores, dL/ds_j = δ·(A_j + Σ_{i>j} B_i); centring C changes
    nothing, for Σ_j B_j = 0. On a CPU the sums over scores are in one order, and so equal to the last bit each time.

    Args:
        slopes: s > 0, [K].
        limit: T.
    """

    def __init__(self, slopes: Tensor, limit: float):
        self.slopes, self.limit = slopes, limit
        self.pieces = len(slopes)
        self.width = 2 * limit / self.pieces

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"slopes": self.slopes}

    def offsets(self) -> Tensor:
        """C, [K], in float64."""
        ends = self.slopes.double().cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        return self.width * (starts - starts[self.pieces // 2])

    def place(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """i and r of the docstring."""
        u = (scores + self.limit) / self.width
        # Towards zero, which is down where it is not clamped; before that no larger than an integer can be.
        index = u.detach().clamp(max=self.pieces).long().clamp_(0, self.pieces - 1)
        return index, u - index

    def value(self, scores: Tensor) -> Tensor:
        index, r = self.place(scores)
        offset, slope = (_Lookup.apply(table.to(scores.dtype), index) for table in (self.offsets(), self.slopes))
        return offset + self.width * r * slope

    def begin(self, dtype: torch.dtype, needed: bool) -> None:
        self.tables = self.offsets().to(dtype), self.slopes.to(dtype)
        self.sums = self.slopes.new_zeros(2, self.pieces, dtype=torch.float64) if needed else None  # A, B

    def map_(self, scores: Tensor) -> tuple[Tensor, Any]:
        index, r = self.place(scores)
        offset, slope = (table.index_select(0, index.flatten()).view_as(scores) for table in self.tables)
        torch.addcmul(offset, r, slope, value=self.width, out=scores)
        return slope, (index, r)

    def collect(self, grad: Tensor, kept: Any) -> None:
        if self.sums is None:
            return
        index, r = kept
        self.sums[0] += bucket_sums(index, r.mul_(grad), self.pieces)
        self.sums[1] += bucket_sums(index, grad, self.pieces)

    def gradients(self) -> dict[str, Tensor]:
        moments, sums = self.sums
        above = sums.flip(0).cumsum(0).flip(0) - sums
        return {"slopes": self.width * (moments + above)}


def bucket_sums(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Sums of the values with each index, [size], in float64."""
    return torch.bincount(index.flatten(), weights=values.flatten().double(), minlength=size)


class _Lookup(torch.autograd.Function):
    """table[index], whose gradient is summed in float64 and in one order; torch's own is neither."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.size = len(table)
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return _BucketSums.apply(grad, index, ctx.size), None


class _BucketSums(torch.autograd.Function):
    """:func:`bucket_sums` in the type of the values, with a gradient: :class:`_Lookup`, whose gradient this is."""

    @staticmethod
    def forward(ctx, values, index, size):
        ctx.save_for_backward(index)
        return bucket_sums(index, values, size).to(values.dtype)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return _Lookup.apply(grad, index), None, None
