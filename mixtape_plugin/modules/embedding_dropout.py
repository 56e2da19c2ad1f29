"""Dropout of whole words from an embedding (Gal and Ghahramani 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def embed_with_dropout(embedding: nn.Embedding, tokens: Tensor, p: float, training: bool) -> Tensor:
    """Embeds ``tokens`` [B, T] as [B, T, E]; each word of the vocabulary is zero with probability ``p`` wherever it
    stands, and scaled by 1/(1−p) otherwise.

    The same as embedding with a [V, E] matrix whose rows are dropped, without making that matrix.
    """
    embedded = embedding(tokens)
    if not training or p == 0:
        return embedded
    word_mask = F.dropout(embedding.weight.new_ones(embedding.num_embeddings, 1), p)
    return embedded * F.embedding(tokens, word_mask)
