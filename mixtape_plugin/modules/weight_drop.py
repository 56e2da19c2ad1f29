"""An LSTM layer with DropConnect on its hidden-to-hidden matrix (Wan et al. 2013, Merity et al. 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixtape_plugin.modules.retained_dropout import RetainsDropout


class WeightDropLSTM(RetainsDropout, nn.Module):
    """One LSTM layer; in training each call zeroes elements of ``weight_hh`` with probability p, the rest are scaled
    by 1/(1−p). The same matrix serves all time steps of the call.

    Parameters, in the order of torch.nn.LSTM's gates (input, forget, cell, output): ``weight_ih`` [4H, I],
    ``weight_hh`` [4H, H], ``bias_ih`` and ``bias_hh`` [4H], all from U(−1/√H, 1/√H).

    Differs from the authors' code: that keeps the raw matrix under another name and puts the dropped one into a
    torch.nn.LSTM, which newer versions of torch ignore without a word.
    """

    def __init__(self, input_size: int, hidden_size: int, weight_dropout: float = 0.0):
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.weight_dropout = weight_dropout
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden_size))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The outputs [B, T, H] for x [B, T, I], and the state (h, c), [B, H] each, after the last step."""
        weight_hh = F.dropout(self.weight_hh, self.weight_dropout, self.drops_out)
        weights = [self.weight_ih, weight_hh, self.bias_ih, self.bias_hh]
        state = [part.unsqueeze(0) for part in state]
        # What torch.nn.LSTM calls: biases, one layer, no dropout between layers, one direction, batch first.
        output, h, c = torch._VF.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        return output, (h.squeeze(0), c.squeeze(0))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, weight_dropout={self.weight_dropout}"
