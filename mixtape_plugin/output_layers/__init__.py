"""Output layers: features [..., D] to a distribution over V tokens. Plain PyTorch, usable in any code::

    layer = build_output_layer(OutputLayerConfig(output_layer="mixtape"), feature_dim=D, vocab_size=V)
    loss, nll = layer.loss(features, target)

A layer is one file, and one row of ``OUTPUT_LAYERS``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence, Type

from torch import nn

from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers.base import OutputLayer
from mixtape_plugin.output_layers.config import OUTPUT_IMPLS, OutputLayerConfig
from mixtape_plugin.output_layers.mixtape import Mixtape
from mixtape_plugin.output_layers.mixture import MixtureLayer
from mixtape_plugin.output_layers.mixture_of_contexts import MixtureOfContexts
from mixtape_plugin.output_layers.mixture_of_softmaxes import MixtureOfSoftmaxes
from mixtape_plugin.output_layers.monotone_softmax import GSS, PLIF, SigSoftmax
from mixtape_plugin.output_layers.softmax import Softmax

if TYPE_CHECKING:
    from fairseq.data import Dictionary

__all__ = [
    "OUTPUT_IMPLS",
    "OUTPUT_LAYERS",
    "MixtureLayer",
    "OutputLayer",
    "OutputLayerConfig",
    "build_output_layer",
    "check_dictionary",
    "find_output_layer",
    "output_layer_class",
]

# What --output-layer takes -> the class. Whatever other code has to know of a layer it asks the class.
OUTPUT_LAYERS = {
    "softmax": Softmax,
    "mos": MixtureOfSoftmaxes,
    "moc": MixtureOfContexts,
    "mixtape": Mixtape,
    "sigsoftmax": SigSoftmax,
    "gss": GSS,
    "plif": PLIF,
}


def output_layer_class(name: str) -> Type[OutputLayer]:
    """The class of ``--output-layer``; raises UserError where there is none of that name."""
    if name not in OUTPUT_LAYERS:
        raise UserError(f"--output-layer {name} is not allowed: {' or '.join(OUTPUT_LAYERS)}")
    return OUTPUT_LAYERS[name]


def find_output_layer(model: nn.Module) -> OutputLayer | None:
    """The output layer of a model's decoder; None where it has none of this plugin."""
    layer = getattr(getattr(model, "decoder", None), "output_projection", None)
    return layer if isinstance(layer, OutputLayer) else None


def build_output_layer(
    config: OutputLayerConfig,
    feature_dim: int,
    vocab_size: int,
    tied_weight: nn.Parameter | None = None,
    masked_tokens: Sequence[int] = (),
) -> OutputLayer:
    """An output layer over features [..., D] and V tokens.

    Args:
        feature_dim: D.
        vocab_size: V.
        tied_weight: the input embedding [V, E], to share.
        masked_tokens: ids that cannot be predicted: their probability is exactly 0, and label smoothing spreads over
            the others only.

    Raises:
        UserError: an option's value is not allowed; the message names it, the value and what is.
    """
    layer_class = output_layer_class(config.output_layer)
    config.check()
    return layer_class(config, feature_dim, vocab_size, tied_weight, masked_tokens)


def check_dictionary(config: OutputLayerConfig, dictionary: Dictionary) -> None:
    """Refuses a dictionary that the layer cannot use: raises UserError, which names an option that helps.

    Args:
        dictionary: a fairseq dictionary, special symbols first.
    """
    layer_class = output_layer_class(config.output_layer)
    config.check()
    layer_class.check_dictionary(config, dictionary)
