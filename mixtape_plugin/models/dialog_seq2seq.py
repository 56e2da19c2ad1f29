"""A Seq2Seq for dialog with any output layer: the last utterances in, a response out, no attention between them.

Shapes: B contexts, T words of a response, U utterances of all contexts, E embedding, D the decoder's units.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    register_model,
    register_model_architecture,
)
from fairseq.modules import FairseqDropout
from fairseq.tasks import FairseqTask
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.models.options import add_options, complete_options, output_layer_for
from mixtape_plugin.models.recurrent_decoder import RecurrentDecoder
from mixtape_plugin.output_layers import OutputLayerConfig

# Before each utterance of a source line: it is by the speaker of the response, or by the other one.
ME, OTHER = "<me>", "<other>"
CONTEXT_ENCODERS = ("hierarchical", "flat")
CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}


@dataclass
class DialogSeq2SeqConfig:
    """The options of ``dialog_seq2seq``; the default sizes are those of Zhao et al. (2017)."""

    context_encoder: ChoiceEnum(list(CONTEXT_ENCODERS)) = field(
        default="hierarchical",
        metadata={"help": "read each utterance, then the sequence of them; flat: all words in one sequence"},
    )
    cell: ChoiceEnum(list(CELLS)) = field(default="gru", metadata={"help": "of all recurrent layers"})
    embed_dim: int = field(default=200, metadata={"help": "E, width of the input embedding that both sides share"})
    utterance_hidden_size: int = field(
        default=300, metadata={"help": "hierarchical: units over the words of an utterance, in each direction"}
    )
    context_hidden_size: int = field(default=600, metadata={"help": "units over the utterances; flat: over all words"})
    decoder_hidden_size: int = field(default=400, metadata={"help": "D, units of the decoder"})
    dropout: float = field(default=0.0, metadata={"help": "dropout on embedded words and on the decoder's output"})


def check_options(args: Namespace) -> None:
    """Raises UserError for the first of the network's options whose value is not allowed."""
    sizes = ("embed_dim", "utterance_hidden_size", "context_hidden_size", "decoder_hidden_size")
    check_values(
        args,
        {
            "context_encoder": (args.context_encoder in CONTEXT_ENCODERS, " or ".join(CONTEXT_ENCODERS)),
            "cell": (args.cell in CELLS, " or ".join(CELLS)),
            **{name: (getattr(args, name) >= 1, "at least 1") for name in sizes},
            "dropout": (0 <= args.dropout < 1, "from 0 to less than 1"),
        },
    )


def last_hidden(rnn: nn.RNNBase, steps: Tensor, lengths: List[int]) -> Tensor:
    """h after the last step of each sequence, of both directions: [sequences, directions·H].

    ``steps`` [sum of lengths, *] has one sequence after the other, of any lengths from 1 on: nothing is padded.
    """
    # Positions are packed, and steps gathered by them: pack_sequence of the steps themselves takes time that grows with
    # the square of the number of sequences, since in its backward pass each of them copies the gradient of all.
    positions = torch.arange(len(steps), device=steps.device).split(lengths)
    packed = pack_sequence(positions, enforce_sorted=False)
    _, state = rnn(packed._replace(data=steps[packed.data]))
    hidden = state[0] if isinstance(state, tuple) else state
    return hidden.transpose(0, 1).flatten(1)


class DialogEncoder(FairseqEncoder):
    """The utterances before a response → one vector.

    hierarchical: a bidirectional layer reads the words of each utterance, its mark first; one more layer reads what
    that gives for each of them, and by two bits whose utterance it is. flat: one layer reads all words and marks.

    An utterance begins at its mark, ``<me>`` or ``<other>``; what a line has before its first mark is the other's.
    ``</s>`` belongs to the last one.

    Raises:
        UserError: hierarchical, and the dictionary has no marks.
    """

    def __init__(self, args: Namespace, dictionary: Dictionary, embed_tokens: nn.Embedding):
        super().__init__(dictionary)
        cell = CELLS[args.cell]
        self.dropout = FairseqDropout(args.dropout, type(self).__name__)
        self.embed_tokens = embed_tokens
        self.marks = [dictionary.index(mark) for mark in (ME, OTHER)]
        self.utterance_rnn = None
        input_size = args.embed_dim
        if args.context_encoder == "hierarchical":
            if dictionary.unk() in self.marks:
                raise UserError(
                    f"--context-encoder hierarchical tells utterances by {ME} and {OTHER}, which this dictionary of "
                    f"{len(dictionary)} types lacks: use data of examples/switchboard/prepare.sh, or flat"
                )
            self.utterance_rnn = cell(args.embed_dim, args.utterance_hidden_size, bidirectional=True)
            input_size = 2 * args.utterance_hidden_size + 2
        self.context_rnn = cell(input_size, args.context_hidden_size)

    def forward(self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None, **kwargs) -> Dict[str, Tensor]:
        """``{"context": [B, context_hidden_size]}`` of source tokens, padded on either side."""
        real = src_tokens.ne(self.dictionary.pad())
        words = self.embed_tokens(src_tokens[real])  # context after context
        words = self.dropout(words)
        if self.utterance_rnn is None:
            return {"context": last_hidden(self.context_rnn, words, real.sum(1).tolist())}
        me, other = self.marks
        starts = real & (src_tokens.eq(me) | src_tokens.eq(other) | real.cumsum(1).eq(1))
        lengths = (starts[real].cumsum(0) - 1).bincount()
        utterances = last_hidden(self.utterance_rnn, words, lengths.tolist())  # [U, 2·utterance_hidden_size]
        floor = F.one_hot(src_tokens[starts].eq(me).long(), 2).to(utterances)
        utterances = torch.cat([utterances, floor], dim=-1)
        return {"context": last_hidden(self.context_rnn, utterances, starts.sum(1).tolist())}

    def reorder_encoder_out(self, encoder_out: Dict[str, Tensor], new_order: Tensor) -> Dict[str, Tensor]:
        return {"context": encoder_out["context"].index_select(0, new_order)}

    def max_positions(self) -> int:
        return int(1e9)


class DialogDecoder(RecurrentDecoder):
    """A recurrent layer that starts from a linear map of the encoder's vector → output layer.

    The state is one tensor [B, D], with LSTM [B, 2·D]: h and c.
    """

    def __init__(self, args: Namespace, dictionary: Dictionary, embed_tokens: nn.Embedding):
        super().__init__(dictionary)
        self.dropout = FairseqDropout(args.dropout, type(self).__name__)
        self.embed_tokens = embed_tokens
        self.num_states = 2 if args.cell == "lstm" else 1
        self.first_state = nn.Linear(args.context_hidden_size, self.num_states * args.decoder_hidden_size)
        self.rnn = CELLS[args.cell](args.embed_dim, args.decoder_hidden_size, batch_first=True)
        self.output_projection = output_layer_for(args, dictionary, args.decoder_hidden_size)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, Tensor]],
        incremental_state: Optional[dict] = None,
        **_,
    ) -> Tuple[Tensor, dict]:
        """The recurrent layer's output after dropout, [B, T, D]; step by step only the last column is read."""
        state = None
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
            state = (self.kept_state(incremental_state) or {}).get("state")
        if state is None:
            state = self.first_state(encoder_out["context"])
        parts = tuple(part.unsqueeze(0).contiguous() for part in state.chunk(self.num_states, dim=-1))
        words = self.dropout(self.embed_tokens(prev_output_tokens))
        features, parts = self.rnn(words, parts if self.num_states > 1 else parts[0])
        if incremental_state is not None:
            state = torch.cat(parts, dim=-1) if self.num_states > 1 else parts
            self.keep_state(incremental_state, {"state": state.squeeze(0)})
        return self.dropout(features), {"attn": [None]}


@register_model("dialog_seq2seq")
class DialogSeq2SeqModel(FairseqEncoderDecoderModel):
    """The encoder-decoder baseline of Zhao et al. (2017) with an output layer of this plugin, for task translation.

    A source line has the utterances of a context, each after its mark (:class:`DialogEncoder`); the target line is the
    response. One dictionary for both: the embedding is shared, the output layer's own is not tied to it.

    Initial values U(±0.08), as there; of the output layer's parameters only its embedding's.

    Raises:
        UserError: the dictionaries differ, or an option's value is not allowed.
    """

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        add_options(parser, OutputLayerConfig, DialogSeq2SeqConfig)

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> "DialogSeq2SeqModel":
        args = complete_options(args, OutputLayerConfig, DialogSeq2SeqConfig)
        check_options(args)
        dictionary = task.target_dictionary
        if task.source_dictionary != dictionary:
            raise UserError(
                f"--arch dialog_seq2seq has one embedding for contexts and responses, and their dictionaries of "
                f"{len(task.source_dictionary)} and {len(dictionary)} types differ: use fairseq-preprocess "
                "--joined-dictionary"
            )
        embed_tokens = nn.Embedding(len(dictionary), args.embed_dim)
        encoder, decoder = DialogEncoder(args, dictionary, embed_tokens), DialogDecoder(args, dictionary, embed_tokens)
        network = [encoder, decoder.first_state, decoder.rnn]
        for parameter in (*(p for part in network for p in part.parameters()), decoder.output_projection.weight):
            nn.init.uniform_(parameter, -0.08, 0.08)
        return cls(encoder, decoder)


@register_model_architecture("dialog_seq2seq", "dialog_seq2seq")
def dialog_seq2seq(args: Namespace) -> None:
    """The defaults of :class:`DialogSeq2SeqConfig`."""
