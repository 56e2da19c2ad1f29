"""What the benchmarks compare: output layers and their rivals at the papers' sizes, what they cost by formula, and the
papers' own times.

Shapes: D features, E embedding, K components, V vocabulary, S frequent tokens, N tokens (of one step).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from typing import ContextManager, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixtape_plugin.errors import UserError
from mixtape_plugin.kernels.common import chunks, longest
from mixtape_plugin.kernels.precision import score_bytes
from mixtape_plugin.output_layers import OUTPUT_LAYERS, OutputLayer, OutputLayerConfig, build_output_layer

GATE_DIM = 64  # d2, which the paper does not give


class Shape(NamedTuple):
    """Sizes of an output layer, and N."""

    shape: str  # its name
    vocab_size: int
    embed_dim: int
    feature_dim: int  # of layers with a projection; the features of the others are E wide
    num_components: int  # of the mixtures but mixtape, which has 4
    frequent_ratio: float
    tokens: int


SHAPES = {
    shape.shape: shape
    for shape in (
        Shape("ptb", 10000, 280, 620, 15, 0.1, 840),  # 12 sequences of 70
        Shape("one-billion", 100000, 900, 1024, 7, 0.1, 256),
        Shape("en-de", 32000, 1024, 1024, 9, 0.5, 1024),
        Shape("en-fr", 32000, 2048, 2048, 9, 0.5, 256),  # the paper's batch: tokens (inferred)
        Shape("en-de-512", 32000, 512, 512, 9, 0.5, 1024),
    )
}

# of --sweep: each V with the K of its shape, and each K with its V
SWEEP_SHAPE = Shape("sweep", 8000, 128, 192, 4, 0.1, 256)
SWEEP_VOCAB_SIZES = (1000, 2000, 4000, 8000, 16000, 32000)
SWEEP_COMPONENTS = (2, 4, 8, 15)


class PaperTimes(NamedTuple):
    """A row of tables 3 to 6, Mixtape (Yang et al. 2019), in units that differ between tables and settings."""

    output_layer: float  # "out layer" and "all layers" at the same batch size
    network: float
    output_layer_in_memory: float  # an instance, at the same memory budget, 12 GB
    network_in_memory: float


PAPER_TIMES = {
    "ptb": {
        "softmax": PaperTimes(14, 328, 0.40, 3.06),
        "mos-3": PaperTimes(147, 439, 3.37, 6.25),
        "mos-5": PaperTimes(173, 488, 4.40, 8.38),
        "mos-10": PaperTimes(242, 609, 6.96, 12.99),
        "mos-15": PaperTimes(310, 731, 9.62, 15.73),
        "mixtape": PaperTimes(27, 345, 0.90, 3.66),
        "mixtape-no-sharing": PaperTimes(95, 487, 3.88, 10.44),
    },
    "one-billion": {
        "softmax": PaperTimes(53, 119, 3.2, 7.0),
        "mos-7": PaperTimes(794, 856, 52.5, 59.8),
        "mixtape": PaperTimes(114, 170, 8.6, 11.3),
        "mixtape-no-sharing": PaperTimes(364, 414, 34.3, 48.6),
    },
    "en-de": {
        "softmax": PaperTimes(2.16, 18.15, 5.4, 37.0),
        "mos-9": PaperTimes(14.36, 30.08, 61.1, 97.9),
        "mixtape": PaperTimes(5.83, 21.48, 17.6, 49.8),
    },
    "en-fr": {
        "softmax": PaperTimes(2.43, 24.06, 15.0, 159.3),
        "mos-9": PaperTimes(7.90, 29.05, 254.0, 936.0),
        "mixtape": PaperTimes(4.88, 26.81, 40.5, 197.2),
    },
}

# of the papers' training runs; a shape without an entry has the gate noise alone
LOCKED = {"context_dropout": 0.29, "locked_context_dropout": True}  # of the MoS paper's code, for every mixture
PAPER_NOISE = {
    "ptb": {**LOCKED, "gate_dropout": 0.2},
    "en-de": {"gate_dropout": 0.2},
    "en-de-512": {"gate_dropout": 0.2},
    "en-fr": {"gate_dropout": 0.15},
}


class Variant(NamedTuple):
    """A layer in one of its implementations."""

    layer: str  # of layer_options(); -K after its name for a K of its own
    impl: str = "eager"  # of OUTPUT_IMPLS, or, of softmax, of PEERS


BASELINE = Variant("softmax", "plain")  # the code that everyone writes


def plain_loss(features: Tensor, weight: Tensor, bias: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(F.linear(features, weight, bias), target, label_smoothing=label_smoothing, reduction="sum")


def torch_loss(features: Tensor, weight: Tensor, bias: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    # torch's own choice of a chunk is slow on a CPU
    options = torch.nn.LinearCrossEntropyOptions(**({} if features.is_cuda else {"batch_chunk_size": 512}))
    return F.linear_cross_entropy(
        features, weight, target, linear_bias=bias, label_smoothing=label_smoothing, reduction="sum", options=options
    )


def liger_loss(features: Tensor, weight: Tensor, bias: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(
        features, weight, target, bias=bias, label_smoothing=label_smoothing, reduction="sum"
    )


def cut_loss(features: Tensor, weight: Tensor, bias: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    if label_smoothing:
        raise NotImplementedError("it has no label smoothing")
    # of release 25.1.1 it has no bias, and goes without
    options = {"bias": bias} if "bias" in inspect.signature(linear_cross_entropy).parameters else {}
    return linear_cross_entropy(features, weight, target, reduction="sum", **options)


# Losses of softmax by others: features [N, E], weight [V, E], bias [V], target [N], ε as torch counts it
PEERS = {"plain": plain_loss, "torch": torch_loss, "liger": liger_loss, "cut-cross-entropy": cut_loss}


def installed_peers(device: str) -> list:
    """Those of :data:`PEERS` that can run here."""
    names = ["plain", *(["torch"] if hasattr(F, "linear_cross_entropy") else [])]
    if device == "cuda":
        modules = {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
        names += [name for name, module in modules.items() if importlib.util.find_spec(module)]
    return names


def layer_options() -> dict:
    """What can be compared -> its options: every output layer, and its variants, whose names come after its own."""
    return {
        "-".join(filter(None, (name, variant))): {"output_layer": name, **options}
        for name, layer_class in OUTPUT_LAYERS.items()
        for variant, options in {"": {}, **layer_class.variants}.items()
    }


def split_layer(layer: str) -> tuple:
    """Kind and K of a layer's name: mos and 15 of mos-15; None where it names no K."""
    kind, _, k = layer.rpartition("-")
    return (kind, int(k)) if k.isdecimal() else (layer, None)


def class_of(layer: str) -> type[OutputLayer]:
    """The class of a layer's name."""
    return OUTPUT_LAYERS[layer_options()[split_layer(layer)[0]]["output_layer"]]


def takes_components(layer: str) -> bool:
    """Whether the layer has the K of the comparison: those that bring a K of their own have it unless told."""
    return class_of(layer).has_components and class_of(layer).usual_components is None


def check_layer(text: str, needs_components: bool = False) -> str:
    """The name of a layer of ``--layers``.

    Args:
        needs_components: whether there is no K to take where the name has none.

    Raises:
        UserError: there is no such layer, or it has no components, or K is missing.
    """
    kind, k = split_layer(text)
    if kind in layer_options():
        missing = k is None and needs_components and takes_components(kind)
        if not missing and (k is None or (k >= 1 and class_of(kind).has_components)):
            return text
    names = [name + needs_components * takes_components(name) * "-K" for name in layer_options()]
    raise UserError(f"--layers {text} is not allowed: {', '.join(names)}; mixtures may end in a K, such as mos-15")


def variants(layers: Sequence[str], impls: Sequence[str]) -> list:
    """The layers in those of the implementations that they have, the baseline first; peers have softmax only."""

    def has(layer, impl):
        return layer == BASELINE.layer if impl in PEERS else impl != "fused" or class_of(layer).has_fused_loss()

    pairs = [Variant(layer, impl) for layer in layers for impl in impls if has(layer, impl)]
    return list(dict.fromkeys([BASELINE, *pairs]))


def num_components(layer: str, shape: Shape) -> int:
    """K of the layer."""
    _, k = split_layer(layer)
    if not class_of(layer).has_components:
        return 1
    return k or class_of(layer).usual_components or shape.num_components


def full_name(layer: str, shape: Shape) -> str:
    """The layer's name with its K, as it is in the paper: that of softmax has none, and mixtape's is 4 anyway."""
    kind, k = split_layer(layer)
    return f"{kind}-{num_components(layer, shape)}" if k or takes_components(layer) else kind


def without_values() -> ContextManager:
    """Inside, modules are built without values and the memory for them, where torch (2.0) can do that."""
    return torch.device("meta") if hasattr(torch.device, "__enter__") else contextlib.nullcontext()


def sized_layer(layer: str, shape: Shape) -> OutputLayer:
    """The layer without values: to be asked what it costs."""
    with without_values():
        return build_layer(Variant(layer), shape)


def multiply_adds(layer: str, shape: Shape) -> int:
    """Multiply-adds a token of the layer's matrix products, forward; forward and backward are 6 times as many FLOPs.

    softmax V·E; MoC V·E + K·E·D; MoS K·V·E + K·E·D; Mixtape V·E + (K−1)·S·E + K·E·D + (K−1)·d2·(S + D). Left out are
    the priors, the shared gates and all that is no matrix product.
    """
    return sized_layer(layer, shape).multiply_adds


def fused_memory(layer: OutputLayer, tokens: int, smooth: bool, device: str, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a layer's fused loss at most: a chunk of scores twice, and the gradients of parameters before they are
    scaled. Where a token has several rows of scores (MoS) and labels are smoothed, it holds a little more than four
    times a chunk, which took up to seven times of glibc's heap."""
    scores, k, size = layer.scores_per_token, layer.score_rows, score_bytes(dtype)
    chunk = longest(chunks(tokens, scores, dtype, torch.device(device), k)) * scores * size
    return (8 if k > 1 and smooth else 2) * chunk + size * sum(p.numel() for p in layer.parameters())


def paper_ratio(layer: str, shape: str, column: str) -> float | None:
    """Time of the layer (its full name) over that of softmax in a column of :class:`PaperTimes`, None if not there."""
    times = PAPER_TIMES.get(shape, {})
    return getattr(times[layer], column) / getattr(times["softmax"], column) if layer in times else None


def build_layer(
    variant: Variant, shape: Shape, noise: bool = False, tied_weight: nn.Parameter | None = None
) -> OutputLayer:
    """The layer of this shape, in training mode; raises UserError where K or r is not allowed."""
    layer, impl = variant
    options = {"frequent_ratio": shape.frequent_ratio, **layer_options()[split_layer(layer)[0]]}
    config = OutputLayerConfig(
        num_components=num_components(layer, shape),
        output_embed_dim=shape.embed_dim,
        gate_dim=GATE_DIM,
        gate_noise=0.1 if noise else 0.0,
        output_impl="eager" if impl in PEERS else impl,
        **options,
        **(PAPER_NOISE.get(shape.shape, {}) if noise else {}),
    )
    feature_dim = shape.feature_dim if class_of(layer).has_projection else shape.embed_dim
    return build_output_layer(config, feature_dim, shape.vocab_size, tied_weight).train()
