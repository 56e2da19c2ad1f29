"""AWD-LSTM language models typed out in float64 for tests to compare with: plain, slow, apart from the plugin.

Merity et al. 2018, "Regularizing and Optimizing LSTM Language Models", as Yang et al. 2018 ("Breaking the Softmax
Bottleneck", appendix B) used it. Random draws are passed in, a dropout mask as the factor itself (0 or 1/(1-p)).

Shapes: B columns, T time, I and H input and hidden width of a layer, E embedding, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch

# ------------------------------------------------------------------------------------------------- the network


LSTM_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def lstm_step(params, x, h, c, weight_mask=None):
    """One step of an LSTM, its gates stacked as torch does (input, forget, candidate, output).

    i, f, o = sigmoid(W x + b + U h + d), g = tanh(...), c' = f c + i g, h' = o tanh(c').
    x [B, I], h and c [B, H], weight_mask [4H, H] a factor on U -> h', c'.
    """
    hidden = h.shape[1]
    recurrent = params["weight_hh"] if weight_mask is None else params["weight_hh"] * weight_mask
    gates = []
    for gate in range(4):
        rows = slice(gate * hidden, (gate + 1) * hidden)
        from_input = x @ params["weight_ih"][rows].T + params["bias_ih"][rows]
        gates.append(from_input + h @ recurrent[rows].T + params["bias_hh"][rows])
    c = torch.sigmoid(gates[1]) * c + torch.sigmoid(gates[0]) * torch.tanh(gates[2])
    return torch.sigmoid(gates[3]) * torch.tanh(c), c


def lstm(params, inputs, state, weight_mask=None):
    """inputs [B, T, I], state (h, c) -> outputs [B, T, H], the last (h, c)."""
    h, c = state
    outputs = []
    for t in range(inputs.shape[1]):
        h, c = lstm_step(params, inputs[:, t], h, c, weight_mask)
        outputs.append(h)
    return torch.stack(outputs, dim=1), (h, c)


def awd_lstm(embedding, layers, tokens, states=None, row_mask=None, input_masks=None, weight_masks=None, mask=None):
    """The network up to its output layer.

    embedding [V, E], layers a list of parameter dicts, tokens [B, T], states a list of (h, c), zeros if left out.
    row_mask [V, 1] multiplies the embedding's rows, input_masks[n] [B, 1, I] what goes into layer n, weight_masks[n]
    its hidden-to-hidden matrix, mask [B, 1, H] the last layer's output.
    Gives features [B, T, H], the same before the mask, and the new states.
    """
    table = embedding if row_mask is None else embedding * row_mask
    x = torch.stack([torch.stack([table[token] for token in column]) for column in tokens.tolist()])
    if states is None:
        zeros = [x.new_zeros(len(tokens), params["weight_hh"].shape[1]) for params in layers]
        states = [(zero, zero) for zero in zeros]
    new_states = []
    for n, params in enumerate(layers):
        if input_masks is not None:
            x = x * input_masks[n]
        x, state = lstm(params, x, states[n], None if weight_masks is None else weight_masks[n])
        new_states.append(state)
    return (x if mask is None else x * mask), x, new_states


def activation_regularization(features, alpha):
    """AR: alpha times the mean square of the last layer's output after dropout, [B, T, H] (Merity et al. sec. 4.6)."""
    return alpha * sum(value * value for value in features.double().flatten().unbind()) / features.numel()


def temporal_activation_regularization(hidden, beta):
    """TAR: beta times the mean square of h_{t+1} - h_t, of the output before dropout [B, T, H]; 0 where T = 1."""
    columns, time, width = hidden.shape
    total = hidden.new_zeros((), dtype=torch.float64)
    for t in range(time - 1):
        for unit in (hidden[:, t + 1] - hidden[:, t]).double().flatten().unbind():
            total = total + unit * unit
    return beta * total / (columns * (time - 1) * width) if time > 1 else total


# ----------------------------------------------------------------------------------------------------- the data


def cut(tokens, columns, training):
    """A stream in contiguous columns. Training: equal ones, the remainder left out. Else: the first ones longer by one.

    Gives for each column its list of (input, target) positions; input -1 is the </s> before the stream.
    """
    size, rest = divmod(len(tokens), columns)
    cuts, start = [], 0
    for column in range(columns):
        length = size if training or column >= rest else size + 1
        cuts.append([(position - 1, position) for position in range(start, start + length)])
        start += length
    return cuts


def segment_length(base, uniform, normal, std=5.0, short_probability=0.05, minimum=5, maximum=None):
    """L = min(cap, max(5, int(Normal(base, 5)))) with half the base in 5% of all draws; the draws are passed in."""
    length = max(minimum, int((base / 2 if uniform < short_probability else base) + std * normal))
    return length if maximum is None else min(length, maximum)


def segment_length_probability(length, base, std=5.0, short_probability=0.05, minimum=5, maximum=None):
    """P(L = length) of the law above, from the normal distribution function."""

    def below(x, mean):
        return 0.5 * (1 + math.erf((x - mean) / (std * math.sqrt(2))))

    probability = 0.0
    for weight, mean in [(1 - short_probability, base), (short_probability, base / 2)]:
        low = -math.inf if length == minimum else length
        high = math.inf if length == maximum else length + 1
        if minimum <= length and (maximum is None or length <= maximum):
            probability += weight * (below(high, mean) - below(low, mean))
    return probability


# ------------------------------------------------------------------------------------------------ the optimizer


def is_nonmonotone(history, value, nonmono):
    """NT-ASGD's trigger (Merity et al. algorithm 1): worse than the best of all but the last `nonmono` before it."""
    return len(history) > nonmono and value > min(history[: len(history) - nonmono])


def sgd_step(weight, gradient, lr, weight_decay):
    return weight - lr * (gradient + weight_decay * weight)


class AveragedSGD:
    """torch.optim.ASGD with t0 = 0 and lambd = 0, for one array.

    A step is made with the eta stored before it, refreshed from lr afterwards: a change of lr takes effect one step
    late, but for the first step. The average is that of all iterates but the first, which the second replaces (torch's
    mu is still 1 then). torch keeps eta and mu in float32.
    """

    def __init__(self, weight, weight_decay):
        self.weight, self.weight_decay = weight, weight_decay
        self.average, self.eta, self.mu, self.steps = weight, None, np.float32(1), 0

    def step(self, gradient, lr):
        eta = np.float32(lr) if self.eta is None else self.eta
        self.weight = self.weight - float(eta) * (gradient + self.weight_decay * self.weight)
        self.average = self.average + float(self.mu) * (self.weight - self.average)
        self.steps += 1
        self.eta, self.mu = np.float32(lr), np.float32(1 / max(1, self.steps))
