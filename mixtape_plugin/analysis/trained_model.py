"""The trained model of a folder, and the text in which it predicts.

Shapes: N contexts, D features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Iterator

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import LanguagePairDataset
from torch import Tensor

from mixtape_plugin.data.bptt_dataset import TokenStream
from mixtape_plugin.errors import UserError
from mixtape_plugin.evaluation.language_model import extract_features, segments, text
from mixtape_plugin.output_layers import OutputLayer, find_output_layer

CHECKPOINTS = ("average.pt", "checkpoint_best.pt")  # the first that is there: evaluate.sh scores it
SCORES_AT_ONCE = 2**22  # of one call of the output layer: 16 MiB in float32, and twice that in float64


@dataclass
class Text:
    """What is predicted: one context for each token.

    Args:
        targets: [N], in the order of the text; every line ends in </s>, which is predicted too.
        starts: the index in ``targets`` at which each line begins, and N at the end.
        dictionary: of the targets.
        sources: of a translation, the symbols of each line's source.
    """

    targets: Tensor
    starts: list
    dictionary: object
    sources: list | None = None

    def __len__(self):
        return len(self.targets)

    def words(self, line: int) -> list:
        """The symbols of a line, counted from 0, with </s>."""
        return [self.dictionary[token] for token in self.targets[self.starts[line] : self.starts[line + 1]]]


@dataclass
class TrainedModel:
    """A model in evaluation mode, its task, and the folder and checkpoint that it is from."""

    folder: Path
    checkpoint: Path
    model: object
    task: object

    @property
    def layer(self) -> OutputLayer:
        return self.model.decoder.output_projection

    @property
    def tokens(self) -> int:
        """V, the symbols that can be predicted."""
        return self.layer.vocab_size - len(set(self.layer.masked_tokens))

    def read(self, split: str) -> Text:
        """The text of a split, loaded when first asked for."""
        data = text(self.task, split)
        dictionary = self.task.target_dictionary
        if isinstance(data, LanguagePairDataset):
            if data.tgt is None:
                raise UserError(f"--subset {split} has no target side: give one with references")
            lines = [data.tgt[i].long() for i in range(len(data))]
            symbols = self.task.source_dictionary
            sources = [[symbols[token] for token in data.src[i]] for i in range(len(data))]
            return Text(torch.cat(lines), [0, *accumulate(map(len, lines))], dictionary, sources)
        if isinstance(data, TokenStream):
            targets = data.tokens.long()
        else:  # in blocks, of --task language_modeling
            targets = torch.cat([data[i]["target"] for i in range(len(data))])
        ends = (targets.eq(dictionary.eos()).nonzero().squeeze(1) + 1).tolist()
        ends += [len(targets)] if not ends or ends[-1] < len(targets) else []
        return Text(targets, [0, *ends], dictionary)

    @torch.no_grad()
    def contexts(self, split: str, batch_size: int | None = None) -> Iterator[tuple]:
        """One walk through a text: features [n, D] and targets [n] of the next n contexts, on the model's device.

        An LSTM reads ``batch_size`` columns (1 unless given, which is in the order of the text), 70 tokens at a time,
        and carries its state along. Of blocks of a text, or sentences of a translation, ``batch_size`` (32) are read at
        a time, teacher-forced, in the order of the text.
        """
        data = text(self.task, split)
        if isinstance(data, TokenStream):
            batches = (extract_features(self.model, b)[:2] for b in segments(self.task, split, batch_size or 1, 70))
        else:
            batches = self._batches(data, batch_size or 32)
        for features, targets in batches:
            keep = targets.ne(self.task.target_dictionary.pad())
            yield features[keep], targets[keep]

    def _batches(self, data, size):
        device = self.layer.weight.device
        for begin in range(0, len(data), size):
            batch = data.collater([data[i] for i in range(begin, min(begin + size, len(data)))])
            batch = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
            features, _ = self.model(**batch["net_input"], features_only=True)
            order = batch["id"].argsort()  # fairseq sorts a batch by length
            yield features[order], batch["target"][order]

    def pieces(self, split: str, batch_size: int | None = None) -> Iterator[tuple]:
        """:meth:`contexts` in pieces for which the output layer takes bounded memory."""
        size = max(SCORES_AT_ONCE // self.layer.scores_per_token, 1)
        for features, targets in self.contexts(split, batch_size):
            yield from zip(features.split(size), targets.split(size))

    def log_probs(self, split: str, batch_size: int | None = None) -> Iterator[tuple]:
        """:meth:`pieces` as log P [n, V] in float32 and targets [n]; nats."""
        for features, targets in self.pieces(split, batch_size):
            with torch.no_grad():
                log_probs = self.layer.log_probs(features)
            yield log_probs, targets

    def possible(self, log_probs: Tensor) -> Tensor:
        """log P without the columns of symbols that cannot be predicted; raises UserError where −∞ is left."""
        if self.layer.vocabulary_mask is not None:
            log_probs = log_probs[:, ~self.layer.vocabulary_mask]
        if not torch.isfinite(log_probs).all():
            raise UserError(f"{self.checkpoint} gives a token the probability 0: log P has no rank")
        return log_probs


def find_checkpoint(folder: Path, name: str | None = None) -> Path:
    """The checkpoint of a folder of train.sh; raises UserError where there is none."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give those that train.sh wrote")
    for candidate in [name] if name else CHECKPOINTS:
        if (folder / candidate).is_file():
            return folder / candidate
    raise UserError(f"{folder} holds no {name or ' or '.join(CHECKPOINTS)}: train.sh and evaluate.sh write them")


def load(folder: str | Path, data: str, name: str | None = None, device: str = "cpu") -> TrainedModel:
    """The model of a folder, in float32.

    Args:
        folder: what train.sh wrote.
        data: folder that fairseq-preprocess wrote, with the dictionary that the model was trained with.
        name: of the checkpoint; unless given, ``average.pt`` where evaluate.sh made one, else ``checkpoint_best.pt``.

    Raises:
        UserError: there is no checkpoint, or its model has no output layer of this plugin.
    """
    path = find_checkpoint(Path(folder), name)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": data})
    if find_output_layer(model) is None:
        raise UserError(f"{path} holds a {type(model).__name__} without an output layer of this plugin")
    return TrainedModel(Path(folder), path, model.float().eval().to(device), task)
