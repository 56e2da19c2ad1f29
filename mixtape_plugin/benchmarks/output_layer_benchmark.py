"""Time and memory of one training step of each output layer: what scripts/benchmark_output_layers.py measures.

Shapes: D features, E embedding, K components, V vocabulary, S frequent tokens, N tokens (of one step).
"""

from __future__ import annotations

import statistics
from typing import Callable, Sequence

import torch
from torch import Tensor, nn

from mixtape_plugin.benchmarks.measuring import (
    Budget,
    Setting,
    available_memory,
    high_water_mark,
    in_fresh_process,
    largest_batch,
    memory_errors,
    peak_or_skip,
    stopwatch,
    summary,
    take_turns,
)
from mixtape_plugin.benchmarks.workloads import (
    BASELINE,
    GATE_DIM,
    PEERS,
    SWEEP_COMPONENTS,
    SWEEP_VOCAB_SIZES,
    Shape,
    Variant,
    build_layer,
    class_of,
    full_name,
    fused_memory,
    multiply_adds,
    num_components,
    paper_ratio,
    sized_layer,
    variants,
)
from mixtape_plugin.kernels.precision import score_bytes

TINY = 16  # tokens of the step that peak memory is measured against

# of a benchmark's rows; times in ms, memory in MB (10^6 bytes), ratios to the plain softmax
COLUMNS = (
    *("shape", "sweep", "sweep_value", "vocab_size", "embed_dim", "feature_dim", "num_components", "frequent_ratio"),
    *("layer", "impl", "memory_budget_gb", "tokens", "fits_more", "ms_median", "ms_min", "ms_max", "us_per_token"),
    *("time_ratio", "flop_ratio", "paper_ratio", "matmul_share", "noise_ratio", "smoothing_ratio"),
    *("peak_memory_mb", "parameters", "skipped"),
)


class Step:
    """One forward and backward pass of a layer, `loss` to the gradients of features and parameters."""

    def __init__(self, variant: Variant, shape: Shape, setting: Setting, tied_weight: nn.Parameter | None = None):
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

    def loss(self, features: Tensor, target: Tensor) -> Tensor:
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


def estimate_memory(variant: Variant, shape: Shape, setting: Setting) -> int:
    """Bytes that a step needs at most: weights, their gradients, and N·values of 4 bytes or more.

    Values of a token, at the peak on a CPU with some to spare: eager 5·V, and 5 for each that the layer's forward
    holds; fused 8·(K·(E + d2) + D), beside :func:`fused_memory`. Peers count as the eager softmax.
    """
    layer = sized_layer(variant.layer, shape)
    dtype = getattr(torch, setting.dtype)
    size, wide = torch.finfo(dtype).bits // 8, score_bytes(dtype)
    fixed = 2 * size * sum(parameter.numel() for parameter in layer.parameters())
    if variant.impl == "eager" or variant.impl in PEERS:
        values = 5 * (layer.scores_per_token + shape.vocab_size)
    else:
        fixed += fused_memory(layer, shape.tokens, setting.label_smoothing > 0, setting.device, dtype)
        k = num_components(variant.layer, shape)
        values = 8 * (k * (shape.embed_dim + GATE_DIM) + layer.feature_dim)
    return fixed + wide * shape.tokens * values


def settings_of(variant: Variant, setting: Setting, prices: bool) -> dict:
    """What a variant is timed in, under the name of the column: as it is and, for ``prices``, with what it costs."""
    settings = {"ms_median": setting}
    if prices and class_of(variant.layer).has_components:  # the others have no noise
        settings["noise_ratio"] = setting._replace(noise=True)
    if prices and variant.impl not in PEERS:
        settings["smoothing_ratio"] = setting._replace(label_smoothing=0.1)
    return settings


def turns(variants: Sequence[Variant], rounds: int, prices: bool = False) -> int:
    """What :func:`benchmark_output_layers` counts: one for the memory of each variant, and each turn, the matrix
    product's too."""
    steps = sum(len(settings_of(variant, Setting(), prices)) for variant in variants)
    return len(variants) + (steps + 1) * (rounds + 1)


def benchmark_output_layers(
    shape: Shape,
    variants: Sequence[Variant],
    setting: Setting,
    rounds: int,
    memory_limit: float | None = None,
    budget: Budget | None = None,
    prices: bool = False,
    tick: Callable[[int], object] = lambda steps: None,
) -> list:
    """Measures the variants at one shape: peak memory first, then time, by :func:`take_turns`.

    Args:
        variants: of :func:`variants`.
        memory_limit: bytes; a variant that needs more by :func:`estimate_memory` is skipped (default: what is free).
        budget: instead of the shape's N, the largest that fits, by :func:`largest_batch`.
        prices: also time each variant with the papers' noise and with label smoothing .1, in the same rounds:
            ``noise_ratio`` and ``smoothing_ratio`` are its times over those without.
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
                settings = settings_of(variant, setting, prices).values()
                estimate = max(estimate_memory(variant, shape, its) for its in settings)
                found, skipped = peak_or_skip(peak, shape.tokens, estimate, limit)
        except Exception as error:
            if variant.impl not in PEERS:
                raise
            found, skipped = None, f"refuses: {(str(error) or type(error).__name__).splitlines()[0]}"
        row["skipped"] = skipped
        if skipped is None:
            row["peak_memory_mb"] = found / 1e6
            run[variant] = row
        tick(1 if skipped is None else turns([variant], rounds, prices) - rounds - 1)

    if not run:
        tick(rounds + 1)
        return rows
    # one embedding for all: five of One Billion Word's would take 2 GB
    embedding = torch.nn.Parameter(torch.empty(shape.vocab_size, shape.embed_dim))
    torch.nn.init.normal_(embedding, std=shape.embed_dim**-0.5)
    steps = {
        (variant, column): Step(variant, shape._replace(tokens=row["tokens"]), its, embedding)
        for variant, row in run.items()
        for column, its in settings_of(variant, setting, prices).items()
    }
    product = MatrixProduct(setting)
    times = take_turns({**steps, product: product}, rounds, tick)
    multiply_adds_a_ms = product.width**3 / statistics.median(times[product])
    for variant, row in run.items():
        row.update(summary(times[variant, "ms_median"]))
        for column in settings_of(variant, setting, prices):
            if column != "ms_median":
                row[column] = statistics.median(times[variant, column]) / row["ms_median"]
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
    sized = sized_layer(layer, shape)
    row["parameters"] = sum(parameter.numel() for parameter in sized.parameters())
    row["num_components"] = num_components(layer, shape)
    row["feature_dim"] = sized.feature_dim
    row["frequent_ratio"] = sized.num_frequent / shape.vocab_size if sized.num_frequent else None
    row["flop_ratio"] = sized.multiply_adds / multiply_adds(BASELINE.layer, shape)
    column = "output_layer_in_memory" if budget else "output_layer"
    row["paper_ratio"] = paper_ratio(row["layer"], shape.shape, column)
    row["memory_budget_gb"] = budget and budget.bytes / 1e9
    return row


def sweep(
    shape: Shape,
    layers: Sequence[str],
    impls: Sequence[str],
    setting: Setting,
    rounds: int,
    memory_limit: float | None = None,
    tick: Callable[[int], object] = lambda steps: None,
) -> list:
    """Rows of :func:`benchmark_output_layers` at each of :data:`SWEEP_VOCAB_SIZES` with the shape's K for all, and at
    each of :data:`SWEEP_COMPONENTS` with the shape's V; ``sweep`` and ``sweep_value`` say which."""
    points = [("V", v, shape._replace(vocab_size=v)) for v in SWEEP_VOCAB_SIZES]
    points += [("K", k, shape._replace(num_components=k)) for k in SWEEP_COMPONENTS]
    rows = []
    for name, value, point in points:
        named = [layer + f"-{point.num_components}" * class_of(layer).has_components for layer in layers]
        found = benchmark_output_layers(point, variants(named, impls), setting, rounds, memory_limit, tick=tick)
        rows += [{**row, "sweep": name, "sweep_value": value} for row in found]
    return rows
