"""What the recurrent decoders share: scores by an output layer, and a state that beam search keeps and reorders.

Shapes: B sequences, T time steps, D features, V vocabulary.
"""

from typing import Dict, Optional, Tuple

from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor


class RecurrentDecoder(FairseqIncrementalDecoder):
    """Features of a recurrent network → ``output_projection``.

    A subclass sets ``output_projection`` and has :meth:`extract_features`, which keeps what it needs at the next step
    of a beam search by :meth:`keep_state`.
    """

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[dict] = None,
        incremental_state: Optional[dict] = None,
        features_only: bool = False,
        **kwargs,
    ) -> Tuple[Tensor, dict]:
        """Scores [B, T, V], or features [B, T, D] with ``features_only``, and what :meth:`extract_features` adds."""
        features, extra = self.extract_features(
            prev_output_tokens, encoder_out=encoder_out, incremental_state=incremental_state, **kwargs
        )
        return (features if features_only else self.output_layer(features)), extra

    def extract_features(self, prev_output_tokens: Tensor, **kwargs) -> Tuple[Tensor, dict]:
        """[B, T, D], and a dictionary for fairseq."""
        raise NotImplementedError

    def output_layer(self, features: Tensor, **kwargs) -> Tensor:
        return self.output_projection(features)

    def kept_state(self, incremental_state: dict) -> Optional[Dict[str, Tensor]]:
        """What :meth:`keep_state` got at the step before, by now in the order of the beam; None at the first."""
        return self.get_incremental_state(incremental_state, "state")

    def keep_state(self, incremental_state: dict, state: Dict[str, Tensor]) -> None:
        """Tensors [B, *], by name."""
        self.set_incremental_state(incremental_state, "state", state)

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> None:
        state = self.kept_state(incremental_state)
        if state is not None:
            self.keep_state(incremental_state, {name: part.index_select(0, new_order) for name, part in state.items()})

    def max_positions(self) -> int:
        return int(1e9)
