"""Self-attention with relative position representations (Shaw et al. 2018, arXiv:1803.02155).

Shapes: B batch, H heads, T queries, S keys, P = D/H features of a head.
"""

from __future__ import annotations

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn


class RelativeMultiheadAttention(MultiheadAttention):
    """e_ij = q_i·(k_j + a^K_d)/√P, z_i = Σ_j softmax_j(e_ij) (v_j + a^V_d), d = clip(j − i, −k, k)
    (Shaw et al., eq. 3 and 4).

    The 2k+1 vectors a^K and a^V belong to one layer and are shared by its heads. Neither [T, S, P] nor any other
    tensor beyond the attention weights' own size is built: q_i·a^K is taken once a distance and gathered, and the
    weights are summed by distance before they meet a^V.

    A drop-in for the self-attention of fairseq's Transformer layers, incremental decoding included.

    Args:
        max_relative_position: k, the distance from which on all positions count as equally far.
    """

    def __init__(self, embed_dim: int, num_heads: int, max_relative_position: int, dropout: float = 0.0, **kwargs):
        super().__init__(embed_dim, num_heads, dropout=dropout, self_attention=True, **kwargs)
        self.max_relative_position = max_relative_position
        self.relative_key = nn.Parameter(torch.empty(2 * max_relative_position + 1, self.head_dim))
        self.relative_value = nn.Parameter(torch.empty(2 * max_relative_position + 1, self.head_dim))
        nn.init.xavier_uniform_(self.relative_key)
        nn.init.xavier_uniform_(self.relative_value)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``query`` [T, B, D] to itself and, with an incremental state, to what came before it.

        Args:
            key_padding_mask: [B, S], true at padding.
            attn_mask: [T, S], added to the logits (−inf where attention is forbidden).

        Returns:
            [T, B, D] and, if asked for, the weights: [B, T, S] averaged over heads or [H, B, T, S].
        """
        length, batch, _ = query.shape

        def heads(x):  # [T, B, D] -> [B, H, T, P]
            return x.view(length, batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)

        q, k, v = heads(self.q_proj(query) * self.scaling), heads(self.k_proj(query)), heads(self.v_proj(query))
        if incremental_state is not None:
            k, v, key_padding_mask = self._extend_cache(incremental_state, k, v, key_padding_mask)

        distance = self._distance_index(length, k.size(2), query.device).expand(batch, self.num_heads, -1, -1)
        # Many positions share the farthest distance: their sum, here in backward and below, needs float32.
        precise = torch.promote_types(q.dtype, torch.float32)
        logits_by_distance = (q @ self.relative_key.t()).to(precise)
        logits = q @ k.transpose(2, 3) + logits_by_distance.gather(3, distance)  # [B, H, T, S]
        if attn_mask is not None:
            logits = logits + attn_mask
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None, None, :].to(torch.bool)
            forbidden = padding if attn_mask is None else padding | attn_mask.isneginf()
            # Padding that comes first has nothing else to look at; without it NaN would spread.
            blind = forbidden.all(-1, keepdim=True)
            logits = logits.masked_fill(padding & ~blind, float("-inf"))
        weights_float = torch.softmax(logits, dim=-1, dtype=precise)
        weights = self.dropout_module(weights_float)

        by_distance = weights.new_zeros(batch, self.num_heads, length, len(self.relative_value))
        by_distance = by_distance.scatter_add(3, distance, weights)
        attended = weights.type_as(v) @ v + by_distance.type_as(v) @ self.relative_value
        output = self.out_proj(attended.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim))
        if not (need_weights or need_head_weights):
            return output, None
        return output, weights_float.transpose(0, 1) if need_head_weights else weights_float.mean(1)

    def _extend_cache(self, incremental_state, k, v, key_padding_mask):
        """Puts the keys and values of earlier steps before these; fairseq's cache, so that beams are reordered."""
        saved = self._get_input_buffer(incremental_state)
        if "prev_key" in saved:
            k = torch.cat([saved["prev_key"], k], dim=2)
            v = torch.cat([saved["prev_value"], v], dim=2)
        key_padding_mask = self._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=saved.get("prev_key_padding_mask"),
            batch_size=k.size(0),
            src_len=k.size(2),
            static_kv=False,
        )
        saved.update(prev_key=k, prev_value=v, prev_key_padding_mask=key_padding_mask)
        self._set_input_buffer(incremental_state, saved)
        return k, v, key_padding_mask

    def _distance_index(self, num_queries: int, num_keys: int, device) -> Tensor:
        """Row of a^K and a^V for each query and key, [T, S]; the queries are the last T of S positions."""
        positions = torch.arange(num_keys, device=device)
        distance = positions[None, :] - positions[num_keys - num_queries :, None]
        return distance.clamp(-self.max_relative_position, self.max_relative_position) + self.max_relative_position
