"""A trained language model, the segments of a text, and a plain evaluation that counts every token once.

Shapes: B columns of the text, T time steps of a segment, N tokens, D the last layer's units, V vocabulary.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import FairseqDataset
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mixtape_plugin.data.bptt_dataset import BpttDataset, TokenStream
from mixtape_plugin.errors import UserError
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel
from mixtape_plugin.output_layers import OutputLayer
from mixtape_plugin.tasks.bptt_language_modeling import BpttLanguageModelingTask


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of a text, summed, in nats, and the number of tokens predicted."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens)"""
        try:
            return math.exp(self.nll / self.tokens)
        except OverflowError:
            return math.inf


def load_language_model(path: str, data: str) -> tuple[AWDLSTMLanguageModel, FairseqTask]:
    """The model of a checkpoint, in evaluation mode on the CPU, and its task reading from another data folder.

    Args:
        path: a checkpoint of ``--arch awd_lstm_lm…``, trained on ``--task bptt_language_modeling``.
        data: folder that fairseq-preprocess wrote, with the dictionary that the model was trained with.

    Raises:
        UserError: there is no such file, or it holds another kind of model, or one that was trained on another task.
    """
    if os.path.isdir(path):
        raise UserError(f"--path {path} is a folder: give a checkpoint in it, such as {path}/checkpoint_best.pt")
    if not os.path.isfile(path):
        raise UserError(f"--path {path} does not exist: give a checkpoint that fairseq-train wrote")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": data})
    if not isinstance(model, AWDLSTMLanguageModel):
        raise UserError(f"--path {path} holds a {type(model).__name__}: give a checkpoint of --arch awd_lstm_lm")
    if not isinstance(task, BpttLanguageModelingTask):
        raise UserError(f"--path {path} was not trained with --task bptt_language_modeling: give one that was")
    return model.eval(), task


def text(task: FairseqTask, split: str) -> TokenStream | FairseqDataset:
    """A split, of a language model one stream of tokens, loaded when first asked for; the training text with all parts
    (train, train1, …) that it was trained on."""
    if split not in task.datasets:
        options = getattr(task, "args", None) or task.cfg  # which of them depends on the task's age
        task.load_dataset(split, combine=split == getattr(options, "train_subset", None))
    return task.dataset(split)


def segments(task: FairseqTask, split: str, columns: int, length: int, training: bool = False) -> Iterator[dict]:
    """The batches of one walk through a split, in order: see :class:`~mixtape_plugin.data.bptt_dataset.BpttDataset`.

    Args:
        columns: B
        length: T of each segment; the last may be shorter.
        training: drop the tokens that do not fill the last step of all columns; else every token is predicted.
    """
    dataset = BpttDataset(text(task, split), columns, length, training)
    return (dataset[i] for i in range(len(dataset)))


def extract_features(model: BaseFairseqModel, batch: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a segment, from the state in which the model left the one before.

    Returns:
        features [B, T, D], targets [B, T] on the model's device, and the last layer's output before dropout [B, T, D].
    """
    device = next(model.parameters()).device
    batch = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
    features, extra = model(**batch["net_input"], features_only=True)
    return features, batch["target"], extra["last_hidden"]


def target_log_probs(layer: OutputLayer, features: Tensor, targets: Tensor) -> Tensor:
    """log p of each target, [N] for features [N, D] and targets [N], in nats, in float32 or better.

    Goes through the contexts in chunks where all scores at once would be too many.
    """
    chunks = zip(features.split(layer.contexts_at_once), targets.split(layer.contexts_at_once))
    return torch.cat([layer.log_probs(f).gather(-1, t.unsqueeze(-1)).squeeze(-1) for f, t in chunks])


def predict(model: AWDLSTMLanguageModel, batch: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Predicts a segment's tokens, column by column, without those that pad the end of a column.

    Returns:
        log p of each target, [N], in nats; the last layer's outputs that they were predicted from, [N, D]; the
        targets, [N].
    """
    features, targets, hidden = extract_features(model, batch)
    keep = targets.ne(model.decoder.dictionary.pad())
    log_probs = target_log_probs(model.decoder.output_projection, features[keep], targets[keep])
    return log_probs, hidden[keep], targets[keep]


def score(log_probs: Tensor) -> Score:
    """The score of a text from log p of each of its tokens, [N], summed in float64."""
    return Score(-log_probs.double().sum().item(), len(log_probs))


@torch.no_grad()
def perplexity(
    model: AWDLSTMLanguageModel,
    task: FairseqTask,
    split: str,
    columns: int = 1,
    length: int = 70,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """Static evaluation, −Σ log p(x_t | x_<t): every token of the text is predicted exactly once.

    The result depends on ``columns``, which all but the first begin without the context before them, and on ``length``
    by rounding only. The model is put into evaluation mode.

    Args:
        progress: called with the number of tokens predicted, after each segment.
    """
    model.eval()
    parts = []
    for batch in segments(task, split, columns, length):
        parts.append(predict(model, batch)[0])
        if progress:
            progress(len(parts[-1]))
    return score(torch.cat(parts))
