"""Dynamic evaluation (Krause et al. 2017): a language model goes on learning from the text it is tested on.

With the RMS rule and the decay towards the trained parameters, as the MoS paper uses it (Yang et al. 2018, table 9).
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Callable, Iterator

import torch
from fairseq.tasks import FairseqTask
from torch import Tensor

from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import Score, extract_features, score, segments, target_log_probs
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel

# Yang et al. 2018, table 9: η, λ, ε. The statistics are of batches of 100, the segments of 5 tokens, for both.
PAPER_SETTINGS = {
    "ptb": {"learning_rate": 0.002, "decay": 0.075, "epsilon": 0.001},
    "wikitext2": {"learning_rate": 0.002, "decay": 0.02, "epsilon": 0.002},
}


@contextmanager
def gradients_without_dropout(model: AWDLSTMLanguageModel) -> Iterator[None]:
    """Evaluation mode, so without dropout and weight drop, in which gradients can be taken.

    cuDNN's LSTM has no backward pass in evaluation mode, so torch's own takes over. oneDNN's is left out as well, which
    torch uses where no gradient is wanted: in here a static evaluation equals one with gradients to the last bit.
    """
    model.eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")  # not what is switched here
        with torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False), torch.enable_grad():
            yield


@dataclass(frozen=True)
class GradientStatistics:
    """What training gradients say of each parameter: tensors of its shape, by its name.

    Attributes:
        rms: MS = sqrt(Σ_batches g²), g the gradient of a batch's mean NLL in nats. A sum, as in the code of MoS: the
            paper of Krause et al. divides by the number of batches, which η and ε would have to follow.
        decay_rate: MS / Σ_tensors mean(MS).
        batches, tokens: how much of the text was used.
    """

    rms: dict[str, Tensor]
    decay_rate: dict[str, Tensor]
    batches: int
    tokens: int


def parameters_of(model: AWDLSTMLanguageModel) -> dict[str, Tensor]:
    """Every trained parameter by its name; a tied one is there once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradient_statistics(
    model: AWDLSTMLanguageModel,
    task: FairseqTask,
    split: str = "train",
    columns: int = 100,
    length: int = 5,
    progress: Callable[[int], None] | None = None,
) -> GradientStatistics:
    """MS and decay rates of all parameters from one walk through the training text, without dropout.

    The hidden state is carried over from segment to segment, the parameters stay what they are. Tokens that do not fill
    a step of all columns are left out. Holds three tensors for each parameter beside itself.

    Args:
        columns: B, the batch size.
        length: T of a segment.
        progress: called with the number of tokens, after each segment.

    Raises:
        UserError: the text is shorter than B tokens, or a gradient is not finite.
    """
    parameters = parameters_of(model)
    square_sum = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    layer = model.decoder.output_projection
    batches = tokens = 0
    with gradients_without_dropout(model):
        for batch in segments(task, split, columns, length, training=True):
            features, targets, _ = extract_features(model, batch)
            loss, _ = layer.loss(features, targets)
            gradients = torch.autograd.grad(loss / targets.numel(), list(parameters.values()), allow_unused=True)
            for square, gradient in zip(square_sum.values(), gradients):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
            batches, tokens = batches + 1, tokens + targets.numel()
            if progress:
                progress(targets.numel())
    rms = {name: square.sqrt_() for name, square in square_sum.items()}
    total = sum(tensor.mean().item() for tensor in rms.values())
    if not (math.isfinite(total) and total > 0):
        raise UserError(
            f"the gradients of the {split} text are not finite, or all zero: this model cannot go on learning"
        )
    return GradientStatistics(rms, {name: tensor / total for name, tensor in rms.items()}, batches, tokens)


def dynamic_evaluation(
    model: AWDLSTMLanguageModel,
    task: FairseqTask,
    split: str,
    statistics: GradientStatistics,
    learning_rate: float,
    decay: float,
    epsilon: float,
    length: int = 5,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Evaluates a text in one column; after each segment, already scored, all parameters θ move:

    θ += λ·decrate·(θ0 − θ) − η·g / (MS + ε), λ·decrate at most 1

    with θ0 the trained parameters and g the gradient of the segment's mean NLL in nats, without dropout. The model has
    its trained parameters again when this returns. η = 0 is the static evaluation, to the last bit where that runs in
    :func:`gradients_without_dropout` with segments as long.

    Differs from the authors' port for AWD-LSTM: that leaves weight drop on; and it does not predict the first token.

    Args:
        statistics: of :func:`gradient_statistics`.
        learning_rate: η
        decay: λ
        epsilon: ε > 0, as a parameter that no training gradient reached has an MS of 0.
        length: T of a segment.
        max_tokens: stop once so many tokens are scored; the whole text without it.
        progress: called with the number of tokens, after each segment.

    Returns:
        the score, infinite where the parameters ran away from any finite loss.
    """
    parameters = parameters_of(model)
    trained = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    pull = {name: (decay * rate).clamp_(max=1.0) for name, rate in statistics.decay_rate.items()}
    scale = {name: rms + epsilon for name, rms in statistics.rms.items()}
    layer = model.decoder.output_projection
    batches = segments(task, split, 1, length)
    parts = []
    try:
        with gradients_without_dropout(model):
            for batch in batches if max_tokens is None else islice(batches, -(-max_tokens // length)):
                features, targets, _ = extract_features(model, batch)  # one column has no padding
                with torch.no_grad():
                    parts.append(target_log_probs(layer, features.flatten(0, 1), targets.flatten()))
                if not parts[-1].isfinite().all():
                    return Score(math.inf, sum(map(len, parts)))
                loss, _ = layer.loss(features, targets)
                gradients = torch.autograd.grad(loss / targets.numel(), list(parameters.values()), allow_unused=True)
                with torch.no_grad():
                    for (name, parameter), gradient in zip(parameters.items(), gradients):
                        parameter.lerp_(trained[name], pull[name])
                        if gradient is not None:
                            parameter.addcdiv_(gradient, scale[name], value=-learning_rate)
                if progress:
                    progress(targets.numel())
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(trained[name])
    return score(torch.cat(parts))
