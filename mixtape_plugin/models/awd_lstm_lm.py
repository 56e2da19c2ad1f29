"""AWD-LSTM language models (Merity et al. 2018) with any output layer.

Shapes: B columns of the text, T time steps, E embedding, D the last layer's units, V vocabulary.
"""

import hashlib
import logging
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple, Union

import torch
from fairseq.data import Dictionary
from fairseq.models import (
    BaseFairseqModel,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.models.options import add_options, complete_options, output_layer_for
from mixtape_plugin.models.recurrent_decoder import RecurrentDecoder
from mixtape_plugin.modules.embedding_dropout import embed_with_dropout
from mixtape_plugin.modules.locked_dropout import locked_dropout
from mixtape_plugin.modules.retained_dropout import RetainsDropout
from mixtape_plugin.modules.weight_drop import WeightDropLSTM
from mixtape_plugin.output_layers import OutputLayerConfig

logger = logging.getLogger(__name__)


@dataclass
class AWDLSTMConfig(OutputLayerConfig):
    """The options of ``awd_lstm_lm``; the defaults are Mixtape on the network of AWD-LSTM on Penn Treebank.

    Two defaults of fairseq-train are others than here: ``LANGUAGE_MODEL_GATES``.
    """

    embed_dim: int = field(default=400, metadata={"help": "E, width of the input embedding"})
    hidden_sizes: str = field(default="1150,1150,400", metadata={"help": "units of each LSTM layer, first to last"})
    untie_embeddings: bool = field(
        default=False, metadata={"help": "an output embedding of its own instead of the input embedding"}
    )
    dropout: float = field(default=0.4, metadata={"help": "locked dropout on the last layer's output"})
    input_dropout: float = field(default=0.4, metadata={"help": "dropouti: locked dropout on the embedded input"})
    hidden_dropout: float = field(default=0.25, metadata={"help": "dropouth: locked dropout between layers"})
    embedding_dropout: float = field(default=0.1, metadata={"help": "dropoute: dropout of whole words from the input"})
    embedding_noise: float = field(
        default=0.0, metadata={"help": "standard deviation of normal noise on the embedded input in training"}
    )
    weight_dropout: float = field(default=0.5, metadata={"help": "dropout on the hidden-to-hidden matrices"})


def parse_hidden_sizes(hidden_sizes: Union[str, int]) -> List[int]:
    """[1150, 1150, 400] out of "1150,1150,400"; one layer's size may be a number, as it is in a yaml file."""
    sizes = str(hidden_sizes).split(",")
    if not all(size.strip().isdecimal() and int(size) >= 1 for size in sizes):
        raise UserError(
            f"--hidden-sizes {hidden_sizes} is not allowed: whole numbers of at least 1 with commas between them, "
            "such as 1150,1150,400"
        )
    return [int(size) for size in sizes]


def check_options(args: Namespace) -> None:
    """Raises UserError for the first of the network's options whose value is not allowed."""
    rates = ("dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_dropout")
    allowed = {name: (0 <= getattr(args, name) < 1, "from 0 to less than 1") for name in rates}
    allowed["embedding_noise"] = (args.embedding_noise >= 0, "0 or more")
    check_values(args, {"embed_dim": (args.embed_dim >= 1, "at least 1"), **allowed})


def vocabulary_digest(dictionary: Dictionary, masked_tokens: Sequence[int]) -> str:
    """SHA-256 of what the rows of an embedding stand for, and of which of them are never predicted."""
    symbols = "\n".join([*dictionary.symbols, *map(str, sorted(masked_tokens))])
    return hashlib.sha256(symbols.encode()).hexdigest()


def check_vocabulary(saved: str, dictionary: Dictionary, masked_tokens: Sequence[int]) -> None:
    """Raises UserError for a checkpoint whose digest is another one."""
    if saved != vocabulary_digest(dictionary, masked_tokens):
        raise UserError(
            f"the dictionary of these data ({len(dictionary)} types) is not the one that the checkpoint was trained "
            "with, or is read otherwise: give its data folder, and fairseq's commands --task bptt_language_modeling "
            "and --remove-eos as then"
        )


class AWDLSTMDecoder(RetainsDropout, RecurrentDecoder):
    """Embedding → LSTM layers with weight drop → output layer.

    Word dropout from the embedding, in training normal noise on it (Parthiban et al. 2021), then locked dropouts (one
    mask for all time steps) on the embedded input, between the layers and on the last layer's output.

    The hidden state is kept here from one segment of a text to the next, under the text's name (``stream``): what
    evaluates a model need not know of it, and validation does not disturb training.

    A checkpoint of another vocabulary is refused, in training too (``vocabulary_version``).

    Initial values as in the authors' code: embeddings U(±0.1), output bias 0, LSTM U(±1/√H), others U(±1/√fan-in)
    but for Mixtape's gates by token, which the papers have no values for: v_x N(0, 1/d2), b_x 0.
    """

    def __init__(self, args: Namespace, dictionary: Dictionary, masked_tokens: Sequence[int] = ()):
        super().__init__(dictionary)
        hidden_sizes = parse_hidden_sizes(args.hidden_sizes)
        self.dropout = args.dropout
        self.input_dropout = args.input_dropout
        self.hidden_dropout = args.hidden_dropout
        self.embedding_dropout = args.embedding_dropout
        self.embedding_noise = args.embedding_noise
        self.embed_tokens = nn.Embedding(len(dictionary), args.embed_dim)
        self.layers = nn.ModuleList(
            WeightDropLSTM(input_size, hidden_size, args.weight_dropout)
            for input_size, hidden_size in zip([args.embed_dim] + hidden_sizes, hidden_sizes)
        )
        self.output_projection = output_layer_for(
            args,
            dictionary,
            hidden_sizes[-1],
            tied_weight=None if args.untie_embeddings else self.embed_tokens.weight,
            masked_tokens=masked_tokens,
        )
        # fairseq's moving averages leave a "version" alone; int64, so that it is also the average of its copies.
        digest = bytes.fromhex(vocabulary_digest(dictionary, self.output_projection.masked_tokens))
        self.register_buffer("vocabulary_version", torch.tensor(list(digest)))
        nn.init.uniform_(self.embed_tokens.weight, -0.1, 0.1)
        nn.init.uniform_(self.output_projection.weight, -0.1, 0.1)
        self.states = {}

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        incremental_state: Optional[dict] = None,
        stream: str = "",
        first_segment: bool = True,
        **_,
    ) -> Tuple[Tensor, dict]:
        """The last layer's output after dropout, [B, T, D].

        Args:
            prev_output_tokens: [B, T]; while decoding step by step only the last column is read.
            incremental_state: a beam search's state, used instead of ``stream`` where it is given.
            stream: name of the text whose next segment this is.
            first_segment: start from a hidden state of zeros.

        Returns:
            the features, and a dictionary: ``last_hidden``, the same before dropout, [B, T, D].
        """
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
            kept = self.kept_state(incremental_state)
            states = kept and [(kept[f"h{i}"], kept[f"c{i}"]) for i in range(len(self.layers))]
        else:
            states = None if first_segment else self.states.get(stream)
            if states is None and not first_segment:
                logger.warning(f"no hidden state was kept for {stream}: it starts from zeros in the middle of the text")
            if states is not None and len(states[0][0]) != len(prev_output_tokens):
                raise UserError(
                    f"the hidden state of {stream} has {len(states[0][0])} columns, and its next segment "
                    f"{len(prev_output_tokens)}: within a text their number cannot change"
                )
        x = embed_with_dropout(self.embed_tokens, prev_output_tokens, self.embedding_dropout, self.drops_out)
        if self.training and self.embedding_noise:  # none is drawn without, so that other trainings stay as they were
            x = x + self.embedding_noise * torch.randn_like(x)
        if states is None:
            states = [(x.new_zeros(x.size(0), layer.hidden_size),) * 2 for layer in self.layers]
        x = locked_dropout(x, self.input_dropout, self.drops_out)
        new_states = []
        for i, (layer, state) in enumerate(zip(self.layers, states)):
            if i > 0:
                x = locked_dropout(x, self.hidden_dropout, self.drops_out)
            x, state = layer(x, state)
            new_states.append(tuple(part.detach() for part in state))
        if incremental_state is not None:
            kept = {f"{name}{i}": part for i, state in enumerate(new_states) for name, part in zip("hc", state)}
            self.keep_state(incremental_state, kept)
        else:
            self.states[stream] = new_states
        return locked_dropout(x, self.dropout, self.drops_out), {"attn": [None], "last_hidden": x}

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> None:
        """Raises UserError for parameters of another vocabulary; fairseq calls it whenever it is about to load some."""
        super().upgrade_state_dict_named(state_dict, name)
        saved = state_dict.setdefault(f"{name}.vocabulary_version", self.vocabulary_version)
        check_vocabulary(bytes(saved.tolist()).hex(), self.dictionary, self.output_projection.masked_tokens)


@register_model("awd_lstm_lm")
class AWDLSTMLanguageModel(FairseqLanguageModel):
    """AWD-LSTM (Merity et al. 2018) with an output layer of this plugin; see :class:`AWDLSTMDecoder`.

    Made for ``--task bptt_language_modeling``, which feeds a text segment by segment and names the symbols that cannot
    be predicted.
    """

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        add_options(parser, AWDLSTMConfig)
        parser.add_argument(
            "--no-gate-weight-norm",
            dest="gate_weight_norm",
            action="store_false",
            default=SUPPRESS,
            help="mixtape: no weight normalisation, where the architecture has it",
        )

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> "AWDLSTMLanguageModel":
        args = complete_options(args, AWDLSTMConfig)
        check_options(args)
        if len(task.source_dictionary) != len(task.target_dictionary):
            raise UserError(
                f"--output-dictionary-size {len(task.target_dictionary)} does not go with --arch awd_lstm_lm, which "
                f"predicts all {len(task.source_dictionary)} types that it reads: leave it out"
            )
        return cls(AWDLSTMDecoder(args, task.target_dictionary, getattr(task, "masked_tokens", ())))


def count_parameters(model: BaseFairseqModel) -> int:
    """Parameters of a language model as the papers quote them: without frozen ones and without the rows of symbols that
    cannot be predicted."""
    layer = model.decoder.output_projection
    by_token = [getattr(layer, name) for name in layer.token_parameters]
    if layer.weight is not model.decoder.embed_tokens.weight:
        by_token.append(model.decoder.embed_tokens.weight)
    unused = sum(rows[0].numel() for rows in by_token for token in layer.masked_tokens if token < len(rows))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) - unused


def register_architecture(name: str, defaults: dict) -> None:
    """Registers an architecture whose options default to a paper's values."""

    def set_defaults(args):
        # Checkpoints of fairseq-hydra-train hold what was given alone: there older ones have OutputLayerConfig's gates.
        gates = LANGUAGE_MODEL_GATES if isinstance(args, Namespace) else {}
        for option, value in {**gates, **defaults}.items():
            setattr(args, option, getattr(args, option, value))

    register_model_architecture("awd_lstm_lm", name)(set_defaults)


# Merity et al. 2018. Yang et al. 2018, with the values of the authors' README where the paper's Table 8 has others.
# Yang et al. 2019 gives K, r and weight norm, but no sizes: these are ours, chosen for MoS's number of parameters
# within 0.1%, with its embedding and last layer. Its gate dropout on language models is not given either: it is that
# of En-De.
AWD_PTB = dict(output_layer="softmax", embed_dim=400, hidden_sizes="1150,1150,400")
AWD_WIKITEXT2 = dict(AWD_PTB, input_dropout=0.65, hidden_dropout=0.2)
MONOTONE_PTB = dict(AWD_PTB, hidden_dropout=0.3)  # Parthiban et al. 2021; on WikiText-2 they have Merity's
MOS = dict(output_layer="mos", num_components=15, context_dropout=0.29, locked_context_dropout=True)
MOC = dict(output_layer="moc")
LANGUAGE_MODEL_GATES = dict(frequent_ratio=0.1, gate_weight_norm=True)  # Mixtape's; in translation .5, and without
MIXTAPE = dict(LANGUAGE_MODEL_GATES, output_layer="mixtape", num_components=4, gate_dim=64)
GATE_DROPOUT = dict(gate_dropout=0.2)
MOS_PTB = dict(MOS, embed_dim=280, hidden_sizes="960,960,620", input_dropout=0.4, hidden_dropout=0.225)
MOS_WIKITEXT2 = dict(MOS, embed_dim=300, hidden_sizes="1150,1150,650", input_dropout=0.55, hidden_dropout=0.2)
NO_DROPOUT = dict(dropout=0.0, input_dropout=0.0, hidden_dropout=0.0, embedding_dropout=0.0, weight_dropout=0.0)
ONE_BILLION = dict(NO_DROPOUT, output_layer="softmax", embed_dim=1024, hidden_sizes="1024,1024")
TEXT8 = dict(NO_DROPOUT, output_layer="softmax", embed_dim=1024, hidden_sizes="1024")
MOS_TEXT8 = dict(TEXT8, output_layer="mos")

ARCHITECTURES = {
    "": {},
    "_ptb": AWD_PTB,
    "_ptb_mos": MOS_PTB,
    "_ptb_moc": {**MOS_PTB, **MOC},
    "_ptb_mixtape": {**MOS_PTB, **MIXTAPE, **GATE_DROPOUT, "hidden_sizes": "1024,1024,620"},
    "_ptb_sigsoftmax": {**MONOTONE_PTB, "output_layer": "sigsoftmax"},
    "_ptb_gss": {**MONOTONE_PTB, "output_layer": "gss"},
    "_ptb_plif": {**MONOTONE_PTB, "output_layer": "plif", "plif_lr_scale": 0.02 / 20},
    "_wikitext2": AWD_WIKITEXT2,
    "_wikitext2_mos": MOS_WIKITEXT2,
    "_wikitext2_moc": {**MOS_WIKITEXT2, **MOC},
    "_wikitext2_mixtape": {**MOS_WIKITEXT2, **MIXTAPE, **GATE_DROPOUT, "hidden_sizes": "1206,1206,650"},
    "_wikitext2_sigsoftmax": dict(AWD_WIKITEXT2, output_layer="sigsoftmax"),
    "_wikitext2_gss": dict(AWD_WIKITEXT2, output_layer="gss", gss_k=3.0),
    "_wikitext2_plif": dict(AWD_WIKITEXT2, output_layer="plif", plif_lr_scale=0.02 / 30),
    "_one_billion": ONE_BILLION,
    "_one_billion_mos": dict(ONE_BILLION, output_layer="mos", num_components=7, embed_dim=900),
    "_one_billion_mixtape": {**ONE_BILLION, **MIXTAPE, "embed_dim": 900, "hidden_sizes": "1144,1024"},
    "_text8": TEXT8,
    "_text8_mos7": dict(MOS_TEXT8, num_components=7, embed_dim=510, hidden_sizes="910"),
    "_text8_mos10": dict(MOS_TEXT8, num_components=10, embed_dim=452, hidden_sizes="860"),
}
for suffix, defaults in ARCHITECTURES.items():
    register_architecture(f"awd_lstm_lm{suffix}", defaults)
