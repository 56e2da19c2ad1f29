"""What the benchmark of networks compares: the texts and networks of the papers, and the papers' own figures.

Shapes: B columns of the text and T time steps of a segment, or B sentences of T tokens on either side, E embedding,
K components, V vocabulary.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import NamedTuple

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, BaseFairseqModel

from mixtape_plugin.benchmarks.workloads import PAPER_TIMES, class_of, layer_options, split_layer
from mixtape_plugin.models.awd_lstm_lm import parse_hidden_sizes  # and with it all architectures

SIZES = ("same", "own")


class TextShape(NamedTuple):
    """Sizes of a text, and of the networks that model it."""

    shape: str  # its name
    arch: str  # of a language model the softmax network's; the mixtures' are named after it
    vocab_size: int  # without masked tokens
    batch_size: int  # B
    segment_length: int  # T
    layers: tuple  # compared by default
    embed_dim: int | None = None  # of all networks, instead of the architectures' own
    hidden_sizes: str | None = None
    label_smoothing: float = 0.0

    @property
    def translates(self) -> bool:
        return self.arch.startswith("mixtape_transformer")


LANGUAGE = ("softmax", "mos-3", "mos-5", "mos-10", "mos-15", "mixtape", "mixtape-no-sharing")  # table 3
WITH_MOC = ("softmax", "moc-15", "mos-15", "mixtape", "mixtape-no-sharing")
ONE_BILLION = ("softmax", "mos-7", "mixtape", "mixtape-no-sharing")
TRANSLATION = ("softmax", "mos-9", "mixtape", "mixtape-no-sharing")
SHAPES = {
    shape.shape: shape
    for shape in (  # batches and segments of the MoS paper; those of translation are 256 tokens, the Mixtape paper's
        TextShape("ptb", "awd_lstm_lm_ptb", 10000, 12, 70, LANGUAGE),
        TextShape("wikitext2", "awd_lstm_lm_wikitext2", 33278, 15, 70, WITH_MOC),
        TextShape("one-billion", "awd_lstm_lm_one_billion", 100000, 60, 35, ONE_BILLION),
        TextShape("en-de", "mixtape_transformer_wmt_en_de_big", 32000, 8, 32, TRANSLATION, label_smoothing=0.1),
        TextShape("en-fr", "mixtape_transformer_wmt_en_fr_big", 32000, 8, 32, TRANSLATION, label_smoothing=0.1),
    )
}

# Slowdown of MoS at one batch size ("bs") and at each network's best batch on one GPU ("best-1"), table 13 of the MoS
# paper (Yang et al. 2018)
MOS_PAPER_RATIOS = {
    "ptb": {"softmax": (1, 1), "mos-5": (1.2, None), "mos-10": (1.6, None), "mos-15": (1.9, 2.8)},
    "wikitext2": {"softmax": (1, 1), "mos-5": (1.3, None), "mos-10": (1.9, None), "mos-15": (2.5, 6.4)},
    "one-billion": {"softmax": (1, 1), "mos-7": (3.8, 5.7)},
}


def mos_paper_ratio(layer: str, shape: str, budget: bool) -> float | None:
    """Time of the network over that of softmax in the MoS paper, where it has both."""
    return MOS_PAPER_RATIOS.get(shape, {}).get(layer, (None, None))[budget]


def paper_output_share(layer: str, shape: str, budget: bool) -> float | None:
    """Share of the output layer in the time of the network in the Mixtape paper, where it has both."""
    times = PAPER_TIMES.get(shape, {}).get(layer)
    if not times:
        return None
    return times.output_layer_in_memory / times.network_in_memory if budget else times.output_layer / times.network


def network_args(layer: str, shape: TextShape, sizes: str = "same") -> Namespace:
    """The options of a layer's network.

    Args:
        layer: a name of :func:`~mixtape_plugin.benchmarks.workloads.layer_options`, with -K where it takes one.
        sizes: ``own``: those of each layer's architecture, as one would train it (MoS's for a layer that has none);
            ``same``: MoS's for all, so that networks differ in the output layer only. The last LSTM before a layer
            without a projection, which is tied, is then E wide. Transformers are the same anyway; their hidden size is
            that of the feed-forward layers.
    """
    kind, k = split_layer(layer)
    args = Namespace(**layer_options()[kind])
    if k:
        args.num_components = k
    if shape.translates:
        args.arch = shape.arch
        ARCH_CONFIG_REGISTRY[args.arch](args)
        args.embed_dim, args.hidden_sizes = args.decoder_embed_dim, args.decoder_ffn_embed_dim
        return args
    mixtures = f"{shape.arch}_mos"
    own, has_projection = f"{shape.arch}_{args.output_layer}", class_of(layer).has_projection
    args.arch = own if own in ARCH_CONFIG_REGISTRY else mixtures if has_projection else shape.arch
    if shape.hidden_sizes:
        common = shape
    elif sizes == "same":
        common = Namespace()
        ARCH_CONFIG_REGISTRY[mixtures](common)
    else:
        common = None
    if common:
        hidden_sizes = parse_hidden_sizes(common.hidden_sizes)
        if not has_projection:
            hidden_sizes[-1] = common.embed_dim
        args.embed_dim, args.hidden_sizes = common.embed_dim, ",".join(map(str, hidden_sizes))
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


def build_network(layer: str, shape: TextShape, sizes: str = "same") -> tuple[BaseFairseqModel, SimpleNamespace]:
    """The network in training mode, and a stand-in for its task; raises UserError where K is not allowed."""
    dictionary = Dictionary()
    for n in range(shape.vocab_size + 2 - dictionary.nspecial):
        dictionary.add_symbol(f"w{n}", n=shape.vocab_size - n)
    task = SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        masked_tokens=(dictionary.bos(), dictionary.pad()),
    )
    args = network_args(layer, shape, sizes)
    return ARCH_MODEL_REGISTRY[args.arch].build_model(args, task).train(), task
