"""How much the predictions in two contexts differ: the mean pairwise divergence (Yang et al. 2018, appendix C.1)."""

from __future__ import annotations

import torch
from torch import Tensor


class PairwiseDivergence:
    """E_{c,c'} KL(P_c‖P_c') over all N² pairs of contexts, in nats, in one walk and two vectors of V.

    mean_c Σ_x P_c(x)·log P_c(x) − Σ_x mean_c P_c(x) · mean_c log P_c(x), which is the double loop over pairs
    multiplied out; summed in float64. The paper samples pairs instead.
    """

    def __init__(self):
        self.contexts, self.negative_entropy, self.probs, self.log_probs = 0, 0.0, 0.0, 0.0

    def add(self, log_probs: Tensor) -> None:
        """The next contexts: log P [n, V], in nats, finite."""
        log_probs = log_probs.double()
        probs = log_probs.exp()
        self.contexts += len(log_probs)
        self.negative_entropy += torch.dot(probs.flatten(), log_probs.flatten()).item()
        self.probs = self.probs + probs.sum(0)
        self.log_probs = self.log_probs + log_probs.sum(0)

    def mean(self) -> float:
        """Over all pairs; N/(N−1) times it is the mean over pairs of distinct contexts."""
        cross = torch.dot(self.probs / self.contexts, self.log_probs / self.contexts).item()
        return self.negative_entropy / self.contexts - cross
