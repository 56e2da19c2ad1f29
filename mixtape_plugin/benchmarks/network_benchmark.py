"""Time and memory of one training step of a whole network, a language model or a Transformer that translates, with each
output layer: what scripts/benchmark_networks.py measures.

Shapes: B columns of the text and T time steps of a segment, or B sentences of T tokens on either side, N = B·T tokens
of one step, E embedding, D the last layer's units, K components, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Callable, Sequence

import torch
from fairseq.optim import FairseqOptimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
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
from mixtape_plugin.benchmarks.network_workloads import (
    TextShape,
    build_network,
    mos_paper_ratio,
    network_args,
    paper_output_share,
)
from mixtape_plugin.benchmarks.workloads import BASELINE, Variant, fused_memory, paper_ratio, plain_loss, without_values
from mixtape_plugin.criterions.awd_lstm_cross_entropy import AWDLSTMCrossEntropy
from mixtape_plugin.criterions.output_layer_cross_entropy import OutputLayerCrossEntropy
from mixtape_plugin.data.bptt_dataset import BpttDataset, TokenStream
from mixtape_plugin.models.awd_lstm_lm import count_parameters
from mixtape_plugin.optim.nt_asgd import NTASGD, NTASGDConfig
from mixtape_plugin.output_layers import OutputLayer, OutputLayerConfig, base, build_output_layer

# the papers' for language models, but for the learning rate, whose value takes no time
CLIP_NORM, WEIGHT_DECAY, LR = 0.25, 1.2e-6, 1.0
TINY = {"vocab_size": 40, "embed_dim": 2, "hidden_sizes": "2,2", "batch_size": 2, "segment_length": 2}
TINY_TRANSLATION = {"arch": "mixtape_transformer_tiny", "vocab_size": 40, "batch_size": 2, "segment_length": 2}

# of a benchmark's rows; times in ms, memory in MB (10^6 bytes), ratios to the plain softmax, shares of the step
COLUMNS = (
    *("shape", "layer", "impl", "arch", "vocab_size", "embed_dim", "hidden_sizes", "label_smoothing"),
    *("memory_budget_gb", "batch_size", "fits_more", "segment_length", "parameters"),
    *("ms_median", "ms_min", "ms_max", "tokens_per_second", "ms_per_instance"),
    *("time_ratio", "paper_ratio", "mos_paper_ratio"),
    *("output_ms_median", "output_ms_min", "output_ms_max", "output_time_ratio", "paper_output_ratio"),
    *("output_share", "paper_output_share", "peak_memory_mb", "skipped"),
)


class TrainingStep:
    """What fairseq-train does with a segment or with sentences: the network with all its dropouts and noises, loss
    (with activation penalties in a language model), backward, clipping there, SGD or, to translate, Adam. The text is
    random, without padding.

    Args:
        like: a step to share the network with: of the same layer and sizes, or, in translation, of another layer, in
            whose place this one's is put. Without that En-Fr's networks, 12 GB each with Adam, would not fit together.
    """

    def __init__(
        self,
        variant: Variant,
        shape: TextShape,
        setting: Setting,
        sizes: str = "same",
        like: TrainingStep | None = None,
    ):
        self.device, self.impl = setting.device, variant.impl
        self.name = variant.layer
        if like:
            self.task, self.model, self.criterion, self.layer = like.task, like.model, like.criterion, like.layer
        else:
            self.model, self.task = build_network(variant.layer, shape, sizes)
            self.model.to(setting.device)
            self.layer = self.model.decoder.output_projection
            criterion = OutputLayerCrossEntropy if shape.translates else AWDLSTMCrossEntropy
            self.criterion = criterion(self.task, sentence_avg=False, label_smoothing=shape.label_smoothing)
        if like and like.name == self.name:
            self.optimizer = like.optimizer
        else:
            if like:
                config = OutputLayerConfig.from_args(network_args(variant.layer, shape))
                v, weight = len(self.task.target_dictionary), like.layer.weight
                self.layer = build_output_layer(config, like.layer.feature_dim, v, weight).to(setting.device)
            self.output_projection()
            self.optimizer = build_optimizer(shape, list(self.model.parameters()))
            if like:  # one update's state for each shared weight
                self.optimizer.optimizer.state = like.optimizer.optimizer.state
        self.clip_norm = 0.0 if shape.translates else CLIP_NORM
        self.sample = (translation_sample if shape.translates else language_sample)(self.task, shape)
        for batch in (self.sample, self.sample["net_input"]):
            batch.update({name: part.to(setting.device) for name, part in batch.items() if torch.is_tensor(part)})

    def output_projection(self) -> OutputLayer:
        """The output layer, put into the network and set to the implementation of this step."""
        layer, plain = self.layer, self.impl == BASELINE.impl
        self.model.decoder.output_projection = layer
        layer.config.output_impl = "eager" if plain else self.impl
        if plain:  # hides the method
            layer.loss = functools.partial(loss_of_the_baseline, layer)
        else:
            vars(layer).pop("loss", None)
        return layer

    def __call__(self) -> float:
        """Takes the step and returns its seconds."""
        self.output_projection()
        with stopwatch(self.device) as elapsed:
            loss, sample_size, _ = self.criterion(self.model, self.sample)
            self.optimizer.backward(loss)
            self.optimizer.multiply_grads(1 / sample_size)
            self.optimizer.clip_grad_norm(self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return elapsed[0]

    def output_layer(self) -> float:
        """Seconds of the output layer's part alone: its loss, and the gradients of features and parameters.

        Its weights stay as they are. Clipping and updating them is not counted, here or in the paper.
        """
        layer, target = self.output_projection(), self.sample["target"]
        features = torch.randn(*target.shape, layer.feature_dim, device=self.device, requires_grad=True)
        options = {"label_smoothing": self.criterion.label_smoothing, "ignore_index": self.criterion.padding_idx}
        with stopwatch(self.device) as elapsed:
            layer.loss(features, target, **options)[0].backward()
        self.optimizer.zero_grad()
        return elapsed[0]


def loss_of_the_baseline(
    layer: OutputLayer, features: Tensor, target: Tensor, *, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """What everyone writes, in place of a softmax layer's ``loss``; the text has no padding."""
    loss = plain_loss(features.flatten(0, -2), layer.weight, layer.bias, target.flatten(), label_smoothing)
    return loss, loss.detach()


def build_optimizer(shape: TextShape, parameters: list[nn.Parameter]) -> FairseqOptimizer:
    if shape.translates:
        return FairseqAdam(FairseqAdamConfig(lr=[1e-4], adam_betas="(0.9, 0.98)", tpu=False), parameters)
    return NTASGD(NTASGDConfig(lr=[LR], weight_decay=WEIGHT_DECAY), parameters)


def random_tokens(task: SimpleNamespace, number: int) -> torch.Tensor:
    predicted = [n for n in range(len(task.target_dictionary)) if n not in task.masked_tokens]
    return torch.tensor(predicted)[torch.randint(len(predicted), (number,))]


def language_sample(task: SimpleNamespace, shape: TextShape) -> dict:
    """A segment of a text."""
    dictionary = task.target_dictionary
    text = random_tokens(task, shape.batch_size * shape.segment_length)
    stream = TokenStream(text, dictionary.eos(), dictionary.pad(), "train")
    return BpttDataset(stream, shape.batch_size, shape.segment_length, training=True)[0]


def translation_sample(task: SimpleNamespace, shape: TextShape) -> dict:
    """Sentences of one length, on either side."""
    size = shape.batch_size, shape.segment_length
    source, target = random_tokens(task, math.prod(size)).view(size), random_tokens(task, math.prod(size)).view(size)
    source[:, -1] = target[:, -1] = task.target_dictionary.eos()
    net_input = {
        "src_tokens": source,
        "src_lengths": torch.full(size[:1], shape.segment_length),
        "prev_output_tokens": target.roll(1, dims=1),
    }
    return {"net_input": net_input, "target": target, "ntokens": target.numel(), "nsentences": len(target)}


def peak_memory(variant: Variant, shape: TextShape, setting: Setting, sizes: str = "same") -> int:
    """Bytes of a training at its peak, the second step included: weights, gradients, and all that a step holds. What
    torch itself takes with its first step is left out.

    Raises:
        MemoryError: there is too little.
    """
    torch.set_num_threads(setting.threads)
    TrainingStep(variant, shape._replace(**TINY_TRANSLATION if shape.translates else TINY), setting)()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = high_water_mark(setting.device)
    with memory_errors():
        step = TrainingStep(variant, shape, setting, sizes)
        step()
        step()
    return high_water_mark(setting.device) - before


def estimate_memory(variant: Variant, shape: TextShape, device: str, sizes: str = "same") -> int:
    """Bytes that a training needs at most: weights, gradients and the update twice over (Adam: its two moments, and
    the largest weight twice), 16 numbers for each unit and token, 8 for each score that an eager output layer holds at
    once, 100 MB for the program."""
    with without_values():
        model, _ = build_network(variant.layer, shape, sizes)
    parameters = [parameter.numel() for parameter in model.parameters()]
    layer = model.decoder.output_projection
    tokens = shape.batch_size * shape.segment_length
    if shape.translates:
        units = sum(part.out_features for part in model.modules() if isinstance(part, torch.nn.Linear))
    else:
        units = sum(part.hidden_size for part in model.decoder.layers) + model.decoder.embed_tokens.embedding_dim
    if variant == BASELINE:
        scores = 4 * 8 * tokens * layer.scores_per_token
    elif variant.impl == "eager":
        scores = 4 * 8 * min(tokens * layer.scores_per_token, base.MAX_SCORES)
    else:
        k = layer.config.num_components if layer.has_components else 1
        scores = fused_memory(layer, tokens, shape.label_smoothing > 0, device)
        scores += 4 * 8 * tokens * (k * (layer.embed_dim + layer.config.gate_dim) + layer.feature_dim)
    held = 4 * sum(parameters) + (2 * max(parameters) if shape.translates else 0)
    return 4 * (held + 16 * tokens * units) + scores + 10**8


def benchmark_networks(
    shape: TextShape,
    variants: Sequence[Variant],
    setting: Setting,
    rounds: int,
    sizes: str = "same",
    memory_limit: float | None = None,
    budget: Budget | None = None,
    tick: Callable[[int], object] = lambda steps: None,
) -> list:
    """Measures the networks at one shape: peak memory first, then time, by :func:`take_turns`, each network's step
    and then its output layer's part of it.

    Args:
        variants: of :func:`~mixtape_plugin.benchmarks.workloads.variants`; with a K in the names of mixtures.
        memory_limit: bytes; a network that needs more by :func:`estimate_memory` is skipped (default: what is free).
        budget: instead of the shape's B, the largest that fits, by :func:`largest_batch`.
        tick: called with the number of turns done, of 2·`rounds` + 3 for each network.

    Returns:
        a dict of :data:`COLUMNS` for each network; None for what was not measured.
    """
    torch.set_num_threads(setting.threads)
    rows, steps, networks = [], {}, {}
    for variant in variants:
        row = new_row(variant, shape, sizes, budget)
        rows.append(row)

        def peak(batch_size, variant=variant):
            measure = (variant, shape._replace(batch_size=batch_size), setting, sizes)
            return peak_memory(*measure) if setting.device == "cuda" else in_fresh_process(peak_memory, *measure)

        if budget:
            most = budget.largest * shape.batch_size
            batch_size, found = largest_batch(peak, budget.bytes, shape.batch_size, 1, most)
            row.update(batch_size=batch_size or None, fits_more=batch_size == most)
            row["skipped"] = None if batch_size else f"not one column or sentence fits in {budget.bytes / 1e9:.3g} GB"
        else:
            limit = available_memory(setting.device) if memory_limit is None else memory_limit
            estimate = estimate_memory(variant, shape, setting.device, sizes)
            found, row["skipped"] = peak_or_skip(peak, shape.batch_size, estimate, limit)
        if not row["skipped"]:
            row["peak_memory_mb"] = found / 1e6
            sized = shape._replace(batch_size=row["batch_size"])
            other = next(iter(networks.values()), None) if shape.translates else None
            step = TrainingStep(variant, sized, setting, sizes, networks.get(variant.layer, other))
            networks[variant.layer] = step
            row["parameters"] = count_parameters(step.model)
            steps[variant, "network"], steps[variant, "output layer"] = step, step.output_layer
        tick(2 * rounds + 3 if row["skipped"] else 1)

    times = take_turns(steps, rounds, tick)
    baseline = rows[variants.index(BASELINE)] if (BASELINE, "network") in times else None
    for variant, row in zip(variants, rows):
        if row["skipped"]:
            continue
        row.update(summary(times[variant, "network"]))
        row.update({f"output_{name}": ms for name, ms in summary(times[variant, "output layer"]).items()})
        row["tokens_per_second"] = 1000 * row["batch_size"] * shape.segment_length / row["ms_median"]
        row["ms_per_instance"] = row["ms_median"] / row["batch_size"]
        row["output_share"] = row["output_ms_median"] / row["ms_median"]
        if baseline:
            row["time_ratio"] = row["ms_per_instance"] / baseline["ms_per_instance"]
            batches = row["batch_size"] / baseline["batch_size"]
            row["output_time_ratio"] = row["output_ms_median"] / baseline["output_ms_median"] / batches
    return rows


def new_row(variant: Variant, shape: TextShape, sizes: str, budget: Budget | None) -> dict:
    """What is known of a row before anything is measured."""
    layer, memory = variant.layer, "_in_memory" if budget else ""
    args = network_args(layer, shape, sizes)
    row = dict.fromkeys(COLUMNS)
    row.update({name: value for name, value in shape._asdict().items() if name in COLUMNS})
    row.update(layer=layer, impl=variant.impl)
    row.update(arch=args.arch, embed_dim=args.embed_dim, hidden_sizes=args.hidden_sizes)
    row["paper_ratio"] = paper_ratio(layer, shape.shape, f"network{memory}")
    row["paper_output_ratio"] = paper_ratio(layer, shape.shape, f"output_layer{memory}")
    row["mos_paper_ratio"] = mos_paper_ratio(layer, shape.shape, bool(budget))
    row["paper_output_share"] = paper_output_share(layer, shape.shape, bool(budget))
    row["memory_budget_gb"] = budget and budget.bytes / 1e9
    return row
