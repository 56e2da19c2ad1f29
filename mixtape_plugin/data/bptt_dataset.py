"""One long text, cut into columns and walked through segment by segment (truncated back-propagation through time).

Shapes: B columns, T time steps of a segment.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset
from torch import Tensor

from mixtape_plugin.errors import UserError

logger = logging.getLogger(__name__)


class TokenStream(FairseqDataset):
    """A text as one stream of tokens, every one of which is a target.

    Args:
        tokens: [n]
        eos: the token before the first one.
        pad: stands where nothing is predicted.
        split: name of the split, for messages.
    """

    def __init__(self, tokens: Tensor, eos: int, pad: int, split: str = ""):
        self.tokens = tokens
        self.eos = eos
        self.pad = pad
        self.split = split

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def draw_segment_lengths(
    total: int,
    base: int,
    std: float = 5.0,
    short_probability: float = 0.05,
    minimum: int = 5,
    maximum: int | None = None,
    seed: int = 1,
    epoch: int = 1,
) -> list[int]:
    """Lengths of an epoch's segments, drawn until they cover ``total`` time steps; the last may reach past the end.

    L = min(maximum, max(minimum, int(Normal(μ, std)))), μ = ``base``, or half of it with ``short_probability``
    (Merity et al. 2018, section 5; the maximum is of the authors' code of MoS). The same for the same seed and epoch,
    in every process.
    """
    random = np.random.RandomState([seed, epoch])
    lengths, covered = [], 0
    while covered < total:
        mean = base / 2 if random.random_sample() < short_probability else base
        length = max(minimum, int(random.normal(mean, std)))
        lengths.append(length if maximum is None else min(length, maximum))
        covered += lengths[-1]
    return lengths


class BpttDataset(FairseqDataset):
    """The batches of one walk through a :class:`TokenStream`; item i is the batch of segment i, for this process.

    The stream is cut into B contiguous columns. An input is the token before its target, also across columns, and
    ``</s>`` before the very first. In training the remainder of n/B is dropped, and the log says so; in evaluation
    nothing is: the first n mod B columns are one step longer, and the others end in one pad.

    A batch holds beside the usual entries: ``net_input.stream``, the name under which the model keeps its hidden
    state; ``net_input.first_segment``; ``lr_scale``, the segment's drawn length over ``base_length``;
    ``segment``, its number from 0; ``last_segment``.

    Args:
        stream: the text.
        columns: B; in training of this process, in evaluation of all processes together.
        lengths: of the segments in turn, or the length of all; what reaches past the end is cut off.
        base_length: the length that has the full learning rate (default: ``lengths``, or the first of them).
        num_shards: number of processes, which share the columns.
        shard_id: this process.
        name: of the hidden state (default: the split's).

    Raises:
        UserError: the text has fewer tokens than there are columns, or there are fewer columns than processes.
        ValueError: the segments do not cover the text, or some have nothing of it.
    """

    def __init__(
        self,
        stream: TokenStream,
        columns: int,
        lengths: int | Sequence[int],
        training: bool = False,
        base_length: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        name: str | None = None,
    ):
        self.pad = stream.pad
        self.name = stream.split if name is None else name
        total_columns = columns * num_shards if training else columns
        if total_columns < num_shards:
            raise UserError(f"{total_columns} columns cannot be shared by {num_shards} processes: raise the batch size")
        targets = torch.as_tensor(stream.tokens)
        if len(targets) < total_columns:
            raise UserError(
                f"the {stream.split} text has {len(targets)} tokens, too few for {total_columns} columns: "
                "lower the batch size or take more text"
            )
        steps, longer = divmod(len(targets), total_columns)
        if training and longer:
            logger.info(
                f"{stream.split}: {longer} of {len(targets):,} tokens do not fill a step of {total_columns} columns "
                "and are left out"
            )
            longer = 0
        self.steps = steps + (longer > 0)
        first, last = total_columns * shard_id // num_shards, total_columns * (shard_id + 1) // num_shards
        begins = [column * steps + min(column, longer) for column in range(first, last + 1)]
        tokens = torch.cat([targets.new_tensor([stream.eos]), targets])
        self.tokens = tokens.new_full((last - first, self.steps + 1), stream.pad)  # each column, and what is before it
        for column, begin, end in zip(self.tokens, begins, begins[1:]):
            column[: end - begin + 1] = tokens[begin : end + 1]
        if isinstance(lengths, int):
            lengths = [lengths] * -(-self.steps // lengths)
        if not sum(lengths[:-1]) < self.steps <= sum(lengths):
            raise ValueError(f"segments of {sum(lengths)} steps do not cover a text of {self.steps}, or some are empty")
        self.lengths = lengths
        self.base_length = base_length or lengths[0]
        self.begins = [0, *accumulate(lengths)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        window = self.tokens[:, self.begins[index] : self.begins[index + 1] + 1]
        inputs, targets = window[:, :-1].long(), window[:, 1:].long()
        return {
            "id": torch.arange(len(inputs)),
            "nsentences": len(inputs),
            "ntokens": int(targets.ne(self.pad).sum()),
            "net_input": {
                "src_tokens": inputs,
                "src_lengths": targets.ne(self.pad).sum(1),
                "stream": self.name,
                "first_segment": index == 0,
            },
            "target": targets,
            "lr_scale": self.lengths[index] / self.base_length,
            "segment": index,
            "last_segment": index == len(self) - 1,
        }

    def collater(self, samples: list[dict]) -> dict:
        """A segment is a batch already."""
        return samples[0]
