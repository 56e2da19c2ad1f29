"""The continuous cache pointer (Grave et al. 2017): words of the recent past become likelier where the hidden state is
like the one they followed.

Shapes: N tokens of the text, D the last layer's units, W window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
from fairseq.tasks import FairseqTask
from torch import Tensor

from mixtape_plugin.evaluation.language_model import Score, predict, score, segments
from mixtape_plugin.kernels.precision import at_least_float32
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel

# Merity et al. 2018: PTB's are their README's (their paper has a window of 2,000), WikiText-2's their code's, to more
# digits.
PAPER_SETTINGS = {
    "ptb": {"weight": 0.1, "theta": 1.0, "window": 500},
    "wikitext2": {"weight": 0.1279, "theta": 0.662, "window": 3785},
}
BLOCK = 512


@dataclass(frozen=True)
class Predictions:
    """A text as the model sees it, token by token.

    Attributes:
        hidden: [N, D], h_t: the last LSTM layer's output after reading the token before target t, without dropout. The
            same that Merity et al. take for AWD-LSTM; MoS, MoC and Mixtape compute their context vectors from it.
        targets: [N]
        log_probs: [N], log p_vocab of each target, in nats.
    """

    hidden: Tensor
    targets: Tensor
    log_probs: Tensor


@torch.no_grad()
def predict_text(
    model: AWDLSTMLanguageModel,
    task: FairseqTask,
    split: str,
    length: int = 70,
    progress: Callable[[int], None] | None = None,
) -> Predictions:
    """The static evaluation of a text in one column, with all its hidden states: N·D numbers of memory.

    Args:
        length: tokens of a segment, which changes the result by rounding only.
        progress: called with the number of tokens, after each segment.
    """
    model.eval()
    parts = []
    for batch in segments(task, split, 1, length):
        log_probs, hidden, targets = predict(model, batch)
        parts.append((hidden, targets, log_probs))
        if progress:
            progress(len(targets))
    return Predictions(*map(torch.cat, zip(*parts)))


def cache_log_probs(
    hidden: Tensor,
    targets: Tensor,
    theta: float,
    window: int,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """log p_cache of each target (Grave et al. 2017, eq. 3), in nats:

    p_cache(x_{t+1} = x) ∝ Σ_{i=t−W}^{t−1} 1[x_{i+1} = x]·exp(θ·h_t·h_i)

    Products and log-sum-exps are in float32, or float64 for float64 input, a block of ``BLOCK`` tokens at a time:
    BLOCK·(BLOCK + W) scores are held.

    Args:
        hidden: h, [N, D].
        targets: the word x_{t+1} that followed each h_t, [N].
        theta: θ; 0 counts words.
        window: W ≥ 1 pairs (h_i, x_{i+1}) before t; fewer at the beginning of the text.
        progress: called with the number of tokens, after each block.

    Returns:
        [N]; −∞ where the target is not in the window, so for the first token, whose cache is empty.
    """
    hidden = hidden.to(at_least_float32(hidden.dtype))
    position = torch.arange(len(targets), device=targets.device)
    log_probs = []
    for begin in range(0, len(targets), BLOCK):
        now = slice(begin, begin + BLOCK)
        past = slice(max(begin - window, 0), begin + BLOCK)
        scores = theta * (hidden[now] @ hidden[past].T)
        age = position[now].unsqueeze(1) - position[past]
        scores.masked_fill_((age < 1) | (age > window), -math.inf)
        total = scores.logsumexp(1)
        same_word = targets[now].unsqueeze(1) == targets[past]
        log_probs.append(scores.masked_fill_(~same_word, -math.inf).logsumexp(1) - total)
        if progress:
            progress(len(total))
    log_probs = torch.cat(log_probs)
    log_probs[0] = -math.inf
    return log_probs


def mix(vocabulary: Tensor, cache: Tensor, weight: float) -> Tensor:
    """log((1−λ)·p_vocab + λ·p_cache) of each target, [N] in nats; p_vocab alone for the first, whose cache is empty.

    Args:
        vocabulary: log p_vocab, [N].
        cache: log p_cache, [N], of :func:`cache_log_probs`.
        weight: λ, 0 ≤ λ < 1; 0 gives back ``vocabulary`` as it is.
    """
    if weight == 0:
        return vocabulary
    mixed = torch.logaddexp(vocabulary + math.log1p(-weight), cache + math.log(weight))
    mixed[0] = vocabulary[0]
    return mixed


def cache_pointer(
    predictions: Predictions,
    weight: float,
    theta: float,
    window: int,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Evaluates a text with the cache: p = (1−λ)·p_vocab + λ·p_cache (Grave et al. 2017, section 3).

    Differs from the code of Merity et al.: that lets the cache speak only when it holds ``window`` pairs; here it does
    from the second token on.

    Args:
        predictions: of :func:`predict_text`.
        weight: λ
        theta: θ
        window: W
        progress: called with the number of tokens, after each block.
    """
    cache = cache_log_probs(predictions.hidden, predictions.targets, theta, window, progress)
    return score(mix(predictions.log_probs, cache, weight))
