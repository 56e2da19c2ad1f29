"""Rank of a matrix of log-probabilities: what the softmax bottleneck bounds (Yang et al. 2018, section 3.3).

Shapes: N contexts, V tokens.
"""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor

FLOAT32_EPSILON = torch.finfo(torch.float32).eps
ROWS = 1024  # contexts that are added to a Gram matrix at once, in float64: 82 MB where V is 10,000
BLOCK = 1024  # columns of it at once: only what lies on or below the diagonal is worked out


def singular_values(log_probs: Tensor) -> Tensor:
    """Singular values of log P [N, V], descending, computed in float64."""
    return torch.linalg.svdvals(log_probs.double())


def press_threshold(contexts: int, tokens: int, epsilon: float = FLOAT32_EPSILON) -> float:
    """½·√(N+V+1)·ε: below this part of σ_max a singular value may be rounding (Press et al. 2007, section 2.6.2)."""
    return 0.5 * (contexts + tokens + 1) ** 0.5 * epsilon


def press_rank(sigma: Tensor, contexts: int, tokens: int, epsilon: float = FLOAT32_EPSILON) -> int:
    """Number of singular values above σ_max times :func:`press_threshold`.

    Args:
        sigma: all singular values of an N × V matrix.
        epsilon: of the type that the matrix was computed in.
    """
    return int((sigma > press_threshold(contexts, tokens, epsilon) * sigma.max()).sum())


def effective_rank(sigma: Tensor, epsilon: float) -> int:
    """The least k with Σ_{i≤k} σ_i² ≥ (1−ε)·Σ σ_i² (Parthiban et al. 2021, table 6).

    Args:
        sigma: singular values, descending, in float64.
    """
    energy = sigma.double().square().cumsum(0)
    return int((energy < (1 - epsilon) * energy[-1]).sum()) + 1


def log_prob_rank(log_probs: Tensor) -> int:
    """:func:`press_rank` of log P [N, V], in nats, finite.

    A softmax over E-wide embeddings with a bias gives at most E + 2: E for H·Wᵀ, one for the bias and one for the
    normalisation of each row.
    """
    return press_rank(singular_values(log_probs), *log_probs.shape)


class Gram:
    """The singular values of log P [N, V], which is handed over some rows at a time: the roots of its Gram matrix's
    eigenvalues, LᵀL [V, V], or L·Lᵀ [N, N] where N < V.

    In float64: the threshold of :func:`press_rank` is about 1.8e-5·σ_max, 3e-10 when squared, which float32 sums miss.
    L itself is held only where N < V, in float32. :func:`gram_bytes` is the memory.
    """

    def __init__(self, contexts: int, tokens: int, device: str = "cpu"):
        self.contexts, self.tokens, self.count, self.waiting = contexts, tokens, 0, 0
        self.by_token = tokens <= contexts
        rows = min(ROWS, contexts) if self.by_token else contexts
        dtype = torch.float64 if self.by_token else torch.float32
        self.rows = torch.empty(rows, tokens, dtype=dtype, device=device)
        size = min(contexts, tokens)
        self.gram = torch.zeros(size if self.by_token else 0, size, dtype=torch.float64, device=device)

    def add(self, log_probs: Tensor) -> None:
        """The next rows of log P, [n, V]; raises ValueError for more rows than there are contexts."""
        if self.count + len(log_probs) > self.contexts:
            raise ValueError(f"more than {self.contexts} contexts")
        self.count += len(log_probs)
        while len(log_probs):
            part = log_probs[: len(self.rows) - self.waiting]
            self.rows[self.waiting : self.waiting + len(part)] = part
            self.waiting += len(part)
            log_probs = log_probs[len(part) :]
            if self.waiting == len(self.rows) and self.by_token:
                self._flush()

    def _flush(self):
        rows = self.rows[: self.waiting]
        for begin in range(0, self.tokens, BLOCK):
            block = slice(begin, begin + BLOCK)
            self.gram[begin:, block].addmm_(rows[:, begin:].T, rows[:, block])
        self.waiting = 0

    def _multiply_rows(self):
        self.gram = torch.zeros(self.count, self.count, dtype=torch.float64, device=self.rows.device)
        for begin in range(0, self.count, BLOCK):
            columns = self.rows[begin : min(begin + BLOCK, self.count)].double()
            for top in range(begin, self.count, BLOCK):
                rows = self.rows[top : min(top + BLOCK, self.count)].double()
                torch.mm(rows, columns.T, out=self.gram[top : top + len(rows), begin : begin + len(columns)])
        self.rows = None

    def singular_values(self) -> Tensor:
        """All of them, descending, [min(N, V)], on the CPU. Ends the sum: what it held is given up."""
        if self.by_token:
            self._flush()
            self.rows = None
        else:
            self._multiply_rows()
        gram, self.gram = self.gram, None
        return symmetric_eigenvalues(gram).flip(0).clamp(min=0).sqrt()


def symmetric_eigenvalues(matrix: Tensor) -> Tensor:
    """Ascending, on the CPU, of what is on and below the diagonal; a matrix on the CPU is overwritten, since
    torch.linalg.eigvalsh would copy it."""
    if matrix.is_cuda:
        return torch.linalg.eigvalsh(matrix).cpu()
    columns = matrix.numpy().T  # as LAPACK stores a matrix: what was below the diagonal is above it
    options = {"overwrite_a": True, "check_finite": False, "driver": "evd"}
    return torch.from_numpy(scipy.linalg.eigh(columns, lower=False, eigvals_only=True, **options))


def gram_bytes(contexts: int, tokens: int, device: str = "cpu") -> int:
    """Memory of :class:`Gram` at most: the matrix, on a GPU a copy for its eigenvalues, and rows of log P."""
    size = min(contexts, tokens)
    rows = 8 * min(ROWS, contexts) * tokens if tokens <= contexts else 4 * contexts * tokens + 16 * BLOCK * tokens
    return max(8 * size**2 + rows, 16 * size**2 if device == "cuda" else 0)


def gram_flops(contexts: int, tokens: int) -> tuple:
    """Floating-point operations of the sum, which are fast, and of the eigenvalues, which wait for memory."""
    size = min(contexts, tokens)
    return contexts * tokens * (size + BLOCK), 4 * size**3 // 3
