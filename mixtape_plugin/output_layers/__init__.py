"""Output layers: features [..., D] to a distribution over V tokens. Usable in any PyTorch code::

layer = build_output_layer(OutputLayerConfig(output_layer="mixtape"), feature_dim=D, vocab_size=V)
loss, nll = layer.loss(features, target)
"""

import math
from dataclasses import dataclass, field
from typing import Optional, Sequence

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.output_layers.base import OutputLayer
from mixtape_plugin.output_layers.mixtape import Mixtape
from mixtape_plugin.output_layers.mixture_of_contexts import MixtureOfContexts
from mixtape_plugin.output_layers.mixture_of_softmaxes import MixtureOfSoftmaxes
from mixtape_plugin.output_layers.softmax import Softmax

__all__ = ["OUTPUT_LAYERS", "OutputLayer", "OutputLayerConfig", "build_output_layer", "check_frequency_order"]

OUTPUT_LAYERS = {"softmax": Softmax, "mos": MixtureOfSoftmaxes, "moc": MixtureOfContexts, "mixtape": Mixtape}
OUTPUT_IMPLS = ("auto", "eager", "fused")


@dataclass
class OutputLayerConfig(FairseqDataclass):
    """The options of every output layer, shared by every model."""

    output_layer: ChoiceEnum(list(OUTPUT_LAYERS)) = field(
        default="mixtape", metadata={"help": "how features become a distribution over the vocabulary"}
    )
    num_components: int = field(default=4, metadata={"help": "K, components of mos, moc (>= 1) and mixtape (>= 2)"})
    output_embed_dim: Optional[int] = field(
        default=None,
        metadata={"help": "E, width of an untied output embedding (default: that of the features; tied: its own)"},
    )
    context_scale: Optional[float] = field(
        default=None,
        metadata={"help": "h_k, or softmax's features, times a learned scale that starts here; 0 or left out: none"},
    )
    context_init: ChoiceEnum(["default", "xavier", "identity"]) = field(
        default="default", metadata={"help": "initial H_k: U(1/sqrt(D)), Xavier for each k, or the identity plus noise"}
    )
    gate_embedding_init: float = field(
        default=1.0, metadata={"help": "standard deviation of v_x in units of 1/sqrt(d2)"}
    )
    gate_weight_scale: float = field(default=1.0, metadata={"help": "constant of the weight normalisation"})
    context_dropout: float = field(default=0.0, metadata={"help": "dropout on the context vectors h_k"})
    locked_context_dropout: bool = field(
        default=False, metadata={"help": "one context dropout mask for all time steps of a sequence"}
    )
    gate_dim: int = field(default=64, metadata={"help": "mixtape: d2, width of the gate embedding v_x"})
    gate_dropout: float = field(default=0.0, metadata={"help": "mixtape: dropout on tanh(U_k g)"})
    gate_noise: float = field(
        default=0.1, metadata={"help": "mixtape: standard deviation of the noise on gate logits in training"}
    )
    frequent_ratio: float = field(
        default=0.5, metadata={"help": "mixtape: r, share of the vocabulary with gates of its own; 1: no gate sharing"}
    )
    gate_weight_norm: bool = field(
        default=False, metadata={"help": "mixtape: weight normalisation of constant scale 1 on U_k"}
    )
    output_impl: ChoiceEnum(list(OUTPUT_IMPLS)) = field(
        default="auto",
        metadata={
            "help": "fused: the loss chunk by chunk, its gradient with it; eager: the formula written out; auto: fused"
        },
    )

    @classmethod
    def from_args(cls, args):
        """The output layer's options out of a model's (a Namespace or a config), defaults where they are missing."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)})


def check_config(config) -> None:
    """Raises UserError for the first option whose value is not allowed, whatever the layer."""
    allowed = {
        "output_layer": (config.output_layer in OUTPUT_LAYERS, " or ".join(OUTPUT_LAYERS)),
        "num_components": (config.num_components >= 1, "at least 1"),
        "output_embed_dim": (config.output_embed_dim is None or config.output_embed_dim >= 1, "at least 1"),
        "context_scale": (0 <= (config.context_scale or 0) < math.inf, "more than 0, or 0 (none)"),
        "context_dropout": (0 <= config.context_dropout < 1, "from 0 to less than 1"),
        "gate_dim": (config.gate_dim >= 1, "at least 1"),
        "gate_dropout": (0 <= config.gate_dropout < 1, "from 0 to less than 1"),
        "gate_noise": (config.gate_noise >= 0, "0 or more"),
        "frequent_ratio": (0 < config.frequent_ratio <= 1, "more than 0 and at most 1"),
        "output_impl": (config.output_impl in OUTPUT_IMPLS, " or ".join(OUTPUT_IMPLS)),
    }
    check_values(config, allowed)


def build_output_layer(
    config, feature_dim: int, vocab_size: int, tied_weight=None, masked_tokens: Sequence[int] = ()
) -> OutputLayer:
    """An output layer over features [..., D] and V tokens.

    Args:
        config: :class:`OutputLayerConfig`.
        feature_dim: D.
        vocab_size: V.
        tied_weight: the input embedding [V, E], to share.
        masked_tokens: ids that cannot be predicted: their probability is exactly 0, and label smoothing spreads over
            the others only.

    Raises:
        UserError: an option's value is not allowed; the message names it, the value and what is.
    """
    check_config(config)
    return OUTPUT_LAYERS[config.output_layer](config, feature_dim, vocab_size, tied_weight, masked_tokens)


def check_frequency_order(config, dictionary) -> None:
    """Refuses a dictionary that gate sharing cannot use: Mixtape's frequent tokens are the first ids.

    Args:
        config: :class:`OutputLayerConfig`; only ``mixtape`` with r < 1 has a demand.
        dictionary: a fairseq dictionary, special symbols first.

    Raises:
        UserError: the counts are not in descending order, or all equal.
    """
    if config.output_layer != "mixtape" or config.frequent_ratio == 1:
        return
    # Past the frequent ids order does not matter: tasks add symbols there, after the padding with counts of 0.
    counts = dictionary.count[dictionary.nspecial :]
    num_frequent = max(round(config.frequent_ratio * len(dictionary)) - dictionary.nspecial, 1)
    frequent, rare = counts[:num_frequent], counts[num_frequent:]
    if frequent != sorted(frequent, reverse=True) or (frequent and max(rare, default=0) > frequent[-1]):
        problem = "is not ordered by frequency"
    elif len(counts) > 1 and len(set(counts) - {0}) <= 1:
        problem = f"gives every token the same count ({counts[0]})"
    else:
        return
    raise UserError(
        f"--frequent-ratio {config.frequent_ratio} shares the gates of rare tokens, but the dictionary {problem}: "
        "write it with fairseq-preprocess, or use --frequent-ratio 1"
    )
