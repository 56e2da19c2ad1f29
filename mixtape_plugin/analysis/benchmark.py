"""Time and memory of one training step of each output layer: what scripts/benchmark_output_layers.py measures.

Shapes: D features, E embedding, K components, V vocabulary, S frequent tokens, N tokens (of one step).
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mixtape_plugin.analysis.measuring import (
    available_memory,
    fit,
    high_water_mark,
    in_fresh_process,
    largest_batch,
    memory_errors,
    stopwatch,
    summary,
    take_turns,
)
from mixtape_plugin.kernels.common import chunks, longest
from mixtape_plugin.output_layers import OUTPUT_IMPLS, OutputLayerConfig, build_output_layer

GATE_DIM = 64  # d2, which the paper does not give
TINY = 16  # tokens of the step that peak memory is measured against
LAYERS = ("softmax", "moc", "mos", "mixtape", "mixtape-no-sharing")


class Shape(NamedTuple):
    """Sizes of an output layer, and N."""

    shape: str  # its name
    vocab_size: int
    embed_dim: int
    feature_dim: int  # of the mixtures; the features of softmax are E wide
    num_components: int  # of mos and moc; mixtape has 4
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
    "ptb": LOCKED,
    "en-de": {"gate_dropout": 0.2},
    "en-de-512": {"gate_dropout": 0.2},
    "en-fr": {"gate_dropout": 0.15},
}

# of a benchmark's rows; times in ms, memory in MB (10^6 bytes), ratios to the eager softmax
COLUMNS = (
    *("shape", "sweep", "sweep_value", "vocab_size", "embed_dim", "feature_dim", "num_components", "frequent_ratio"),
    *("layer", "impl", "memory_budget_gb", "tokens", "fits_more", "ms_median", "ms_min", "ms_max", "us_per_token"),
    *("time_ratio", "flop_ratio", "paper_ratio", "matmul_share", "peak_memory_mb", "parameters", "skipped"),
)


class Setting(NamedTuple):
    """How to run, the same for every layer and shape."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    noise: bool = False
    label_smoothing: float = 0.0


class Variant(NamedTuple):
    """A layer in one of its implementations."""

    layer: str  # of LAYERS; -K after its name for a K of its own
    impl: str = "eager"  # of OUTPUT_IMPLS, or, of softmax, of PEERS


BASELINE = Variant("softmax", "eager")


class Budget(NamedTuple):
    """Of memory: for weights, gradients and all that a step holds."""

    bytes: float
    largest: int = 16  # times the shape's own batch, at most


def torch_loss(features, weight, bias, target, label_smoothing):
    # torch's own choice of a chunk is slow on a CPU
    options = torch.nn.LinearCrossEntropyOptions(**({} if features.is_cuda else {"batch_chunk_size": 512}))
    return F.linear_cross_entropy(
        features, weight, target, linear_bias=bias, label_smoothing=label_smoothing, reduction="sum", options=options
    )


def liger_loss(features, weight, bias, target, label_smoothing):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(
        features, weight, target, bias=bias, label_smoothing=label_smoothing, reduction="sum"
    )


def cut_loss(features, weight, bias, target, label_smoothing):
    from cut_cross_entropy import linear_cross_entropy

    if label_smoothing:
        raise NotImplementedError("it has no label smoothing")
    return linear_cross_entropy(features, weight, target, bias=bias, reduction="sum")


# Losses of softmax by others: features [N, E], weight [V, E], bias [V], target [N], ε as torch counts it
PEERS = {"torch": torch_loss, "liger": liger_loss, "cut-cross-entropy": cut_loss}


def installed_peers(device: str) -> list:
    """Those of :data:`PEERS` that can run here."""
    names = ["torch"] if hasattr(F, "linear_cross_entropy") else []
    if device == "cuda":
        modules = {"liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
        names += [name for name, module in modules.items() if importlib.util.find_spec(module)]
    return names


def variants(layers, impls) -> list:
    """The layers in their implementations, the eager softmax first; peers have softmax only."""
    pairs = [Variant(layer, impl) for layer in layers for impl in impls if layer == "softmax" or impl in OUTPUT_IMPLS]
    return list(dict.fromkeys([BASELINE, *pairs]))


def split_layer(layer: str) -> tuple:
    """Kind and K of a layer's name: mos and 15 of mos-15; None where it names no K."""
    kind, _, k = layer.rpartition("-")
    return (kind, int(k)) if k.isdigit() else (layer, None)


def num_components(layer: str, shape: Shape) -> int:
    """K of the layer."""
    kind, k = split_layer(layer)
    return k or {"softmax": 1, "moc": shape.num_components, "mos": shape.num_components}.get(kind, 4)


def full_name(layer: str, shape: Shape) -> str:
    """The layer's name with its K, as it is in the paper: that of softmax has none, and mixtape's is 4 anyway."""
    kind, k = split_layer(layer)
    return f"{kind}-{num_components(layer, shape)}" if k or kind in ("moc", "mos") else kind


def num_frequent(layer: str, shape: Shape) -> int:
    """S of mixtape."""
    no_sharing = layer.startswith("mixtape-no-sharing")
    return shape.vocab_size if no_sharing else round(shape.frequent_ratio * shape.vocab_size)


def multiply_adds(layer: str, shape: Shape, projected: bool = False) -> int:
    """Multiply-adds a token of the layer's matrix products, forward; forward and backward are 6 times as many FLOPs.

    softmax V·E; MoC V·E + K·E·D; MoS K·V·E + K·E·D; Mixtape V·E + (K−1)·S·E + K·E·D + (K−1)·d2·(S + D). Left out are
    the priors, the shared gates and all that is no matrix product.

    Args:
        projected: count the D to E projection that softmax needs to start from the mixtures' features.
    """
    v, e, d = shape.vocab_size, shape.embed_dim, shape.feature_dim
    k, s = num_components(layer, shape), num_frequent(layer, shape)
    return {
        "softmax": v * e + (e * d if projected else 0),
        "moc": v * e + k * e * d,
        "mos": k * v * e + k * e * d,
        "mixtape": v * e + (k - 1) * s * e + k * e * d + (k - 1) * GATE_DIM * (s + d),
    }[layer.split("-")[0]]


def count_parameters(layer: str, shape: Shape) -> int:
    """Parameters of the layer, its embedding included."""
    v, e, d = shape.vocab_size, shape.embed_dim, shape.feature_dim
    k, s = num_components(layer, shape), num_frequent(layer, shape)
    kind = layer.split("-")[0]
    count = v * (e + 1)
    if kind != "softmax":
        count += k * e * (d + 1)
    if kind in ("moc", "mos"):
        count += k * d
    elif kind == "mixtape":
        count += (k - 1) * (GATE_DIM * (d + 1) + d + s) + s * GATE_DIM
    return count


def paper_ratio(layer: str, shape: str, column: str) -> float | None:
    """Time of the layer (its full name) over that of softmax in a column of :class:`PaperTimes`, None if not there."""
    times = PAPER_TIMES.get(shape, {})
    return getattr(times[layer], column) / getattr(times["softmax"], column) if layer in times else None


def build_layer(variant: Variant, shape: Shape, noise: bool = False, tied_weight=None):
    """The layer of this shape, in training mode; raises UserError where K or r is not allowed."""
    layer, impl = variant
    config = OutputLayerConfig(
        output_layer=layer.split("-")[0],
        num_components=num_components(layer, shape),
        output_embed_dim=shape.embed_dim,
        gate_dim=GATE_DIM,
        frequent_ratio=1.0 if layer.startswith("mixtape-no-sharing") else shape.frequent_ratio,
        gate_noise=0.1 if noise else 0.0,
        output_impl="eager" if impl in PEERS else impl,
        **(PAPER_NOISE.get(shape.shape, {}) if noise else {}),
    )
    feature_dim = shape.embed_dim if layer == "softmax" else shape.feature_dim
    return build_output_layer(config, feature_dim, shape.vocab_size, tied_weight).train()


class Step:
    """One forward and backward pass of a layer, `loss` to the gradients of features and parameters."""

    def __init__(self, variant: Variant, shape: Shape, setting: Setting, tied_weight=None):
        self.device, self.label_smoothing = setting.device, setting.label_smoothing
        place = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
        self.layer = build_layer(variant, shape, setting.noise, tied_weight).to(**place)
        self.peer = PEERS.get(variant.impl)
        # [1, N, D] and not [N, D] because locked dropout needs a time dimension
        self.features = torch.randn(1, shape.tokens, self.layer.feature_dim, **place)
        self.target = torch.randint(shape.vocab_size, (1, shape.tokens), device=setting.device)

    def __call__(self, tokens: int | None = None) -> float:
        """Runs the step on the first `tokens` (default: all) and returns its seconds."""
        features = self.features[:, :tokens].detach().requires_grad_()
        target = self.target[:, :tokens]
        with stopwatch(self.device) as elapsed:
            self.loss(features, target).backward()
        for parameter in self.layer.parameters():
            parameter.grad = None  # as fairseq does: the next backward allocates, and does not add
        return elapsed[0]

    def loss(self, features, target):
        if not self.peer:
            return self.layer.loss(features, target, label_smoothing=self.label_smoothing)[0]
        v = self.layer.vocab_size  # torch's ε goes to all tokens, the target among them
        smoothing = self.label_smoothing * v / (v - 1)
        return self.peer(features.flatten(0, 1), self.layer.weight, self.layer.bias, target.flatten(), smoothing)


class MatrixProduct:
    """A large square matrix product, whose speed is what a layer's can be compared with."""

    def __init__(self, setting: Setting):
        self.device, self.width = setting.device, 8192 if setting.device == "cuda" else 1024
        place = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
        self.factors = torch.randn(self.width, self.width, **place), torch.randn(self.width, self.width, **place)

    def __call__(self) -> float:
        with stopwatch(self.device) as elapsed:
            torch.mm(*self.factors)
        return elapsed[0]


def peak_memory(variant: Variant, shape: Shape, setting: Setting) -> int:
    """Bytes that a step on N tokens holds at its peak beyond one on 16: weights and their gradients don't count.

    Raises:
        MemoryError: there is too little.
    """
    torch.set_num_threads(setting.threads)
    with memory_errors():
        step = Step(variant, shape, setting)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step(TINY)
        tiny = high_water_mark(setting.device)
        step()
    return high_water_mark(setting.device) - tiny


def peak_memory_of_fresh_process(variant: Variant, shape: Shape, setting: Setting) -> int:
    return in_fresh_process(peak_memory, variant, shape, setting)


def fused_memory(kind: str, scores_per_token: int, k: int, tokens: int, parameters: int, smooth: bool, size: int = 4):
    """Bytes of a fused loss at most: a chunk of scores twice, or six times where MoS smooths labels, and the gradients
    of parameters before they are scaled."""
    chunk = longest(chunks(tokens, scores_per_token * size, k if kind == "mos" else 1)) * scores_per_token * size
    return (6 if kind == "mos" and smooth else 2) * chunk + size * parameters


def estimate_memory(variant: Variant, shape: Shape, setting: Setting) -> int:
    """Bytes that a step needs at most: weights, their gradients, and N·values of 4 bytes or more.

    Values of a token, at the peak on a CPU with some to spare: eager softmax and MoC 5·V, MoS 5·(K+1)·V, Mixtape
    5·V + 25·S for K = 4; fused 8·(K·(E + d2) + D), beside :func:`fused_memory`. Peers count as the eager softmax.
    """
    kind, v, k = variant.layer.split("-")[0], shape.vocab_size, num_components(variant.layer, shape)
    s = num_frequent(variant.layer, shape) if kind == "mixtape" else 0
    size = torch.finfo(getattr(torch, setting.dtype)).bits // 8
    wide = max(4, size)
    parameters = count_parameters(variant.layer, shape)
    fixed = 2 * size * parameters
    if variant.impl == "eager" or variant.impl in PEERS:
        values = 5 * v * (k + 1 if kind == "mos" else 1) + 25 * s * k // 4
    else:
        scores = k * v if kind == "mos" else v + (2 * k - 1) * s
        fixed += fused_memory(kind, scores, k, shape.tokens, parameters, setting.label_smoothing > 0, wide)
        values = 8 * (k * (shape.embed_dim + GATE_DIM) + shape.feature_dim)
    return fixed + wide * shape.tokens * values


def turns(variants: int, rounds: int) -> int:
    """What :func:`benchmark` counts: one for the memory of each variant, and each turn, the matrix product's too."""
    return variants * (rounds + 2) + rounds + 1


def benchmark(
    shape: Shape,
    variants,
    setting: Setting,
    rounds: int,
    memory_limit=None,
    budget: Budget | None = None,
    tick=lambda steps: None,
) -> list:
    """Measures the variants at one shape: peak memory first, then time, by :func:`take_turns`.

    Args:
        variants: of :func:`variants`.
        memory_limit: bytes; a variant that needs more by :func:`estimate_memory` is skipped (default: what is free).
        budget: instead of the shape's N, the largest that fits, by :func:`largest_batch`.
        tick: called with the number of turns done, of :func:`turns`.

    Returns:
        a dict of :data:`COLUMNS` for each variant; None for what was not measured.
    """
    limit = available_memory(setting.device) if memory_limit is None else memory_limit
    torch.set_num_threads(setting.threads)
    size = torch.finfo(getattr(torch, setting.dtype)).bits // 8
    measure = peak_memory if setting.device == "cuda" else peak_memory_of_fresh_process
    rows, run = [], {}
    for variant in variants:
        row = new_row(variant, shape, budget)
        rows.append(row)

        def peak(tokens, variant=variant):
            return measure(variant, shape._replace(tokens=tokens), setting)

        try:
            if budget:
                fixed = 2 * size * row["parameters"]
                most = budget.largest * shape.tokens
                tokens, found = largest_batch(peak, budget.bytes - fixed, shape.tokens, TINY + 1, most)
                row.update(tokens=tokens or None, fits_more=tokens == most)
                skipped = None if tokens else f"{TINY + 1} tokens do not fit in {budget.bytes / 1e9:.3g} GB"
            else:
                found, skipped = fit(peak, shape.tokens, estimate_memory(variant, shape, setting), limit)
        except Exception as error:
            if variant.impl not in PEERS:
                raise
            found, skipped = None, f"refuses: {(str(error) or type(error).__name__).splitlines()[0]}"
        row["skipped"] = skipped
        if skipped is None:
            row["peak_memory_mb"] = found / 1e6
            run[variant] = row
        tick(1 if skipped is None else rounds + 2)

    if not run:
        tick(rounds + 1)
        return rows
    # one embedding for all: five of One Billion Word's would take 2 GB
    embedding = torch.nn.Parameter(torch.empty(shape.vocab_size, shape.embed_dim))
    torch.nn.init.normal_(embedding, std=shape.embed_dim**-0.5)
    steps = {v: Step(v, shape._replace(tokens=row["tokens"]), setting, embedding) for v, row in run.items()}
    product = MatrixProduct(setting)
    times = take_turns({**steps, product: product}, rounds, tick)
    multiply_adds_a_ms = product.width**3 / statistics.median(times[product])
    for variant, row in run.items():
        row.update(summary(times[variant]))
        row["us_per_token"] = 1000 * row["ms_median"] / row["tokens"]
        speed = row["tokens"] * 3 * multiply_adds(variant.layer, shape) / row["ms_median"]
        row["matmul_share"] = speed / multiply_adds_a_ms
        if BASELINE in run:
            row["time_ratio"] = row["us_per_token"] / run[BASELINE]["us_per_token"]
    return rows


def new_row(variant: Variant, shape: Shape, budget: Budget | None) -> dict:
    """What is known of a row before anything is measured."""
    layer = variant.layer
    row = dict.fromkeys(COLUMNS)
    row.update(shape._asdict(), layer=full_name(layer, shape), impl=variant.impl)
    row["parameters"] = count_parameters(layer, shape)
    row["num_components"] = num_components(layer, shape)
    row["feature_dim"] = shape.embed_dim if layer == "softmax" else shape.feature_dim
    row["frequent_ratio"] = num_frequent(layer, shape) / shape.vocab_size if layer.startswith("mixtape") else None
    row["flop_ratio"] = multiply_adds(layer, shape) / multiply_adds("softmax", shape)
    column = "output_layer_in_memory" if budget else "output_layer"
    row["paper_ratio"] = paper_ratio(row["layer"], shape.shape, column)
    row["memory_budget_gb"] = budget and budget.bytes / 1e9
    return row


def sweep(shape: Shape, layers, impls, setting: Setting, rounds: int, memory_limit=None, tick=lambda steps: None):
    """Rows of :func:`benchmark` at each of :data:`SWEEP_VOCAB_SIZES` with the shape's K for all, and at each of
    :data:`SWEEP_COMPONENTS` with the shape's V; ``sweep`` and ``sweep_value`` say which."""
    points = [("V", v, shape._replace(vocab_size=v)) for v in SWEEP_VOCAB_SIZES]
    points += [("K", k, shape._replace(num_components=k)) for k in SWEEP_COMPONENTS]
    rows = []
    for name, value, point in points:
        named = [layer if layer == "softmax" else f"{layer}-{point.num_components}" for layer in layers]
        found = benchmark(point, variants(named, impls), setting, rounds, memory_limit, tick=tick)
        rows += [{**row, "sweep": name, "sweep_value": value} for row in found]
    return rows
