"""Time and memory of one training step of a whole language model with each output layer: what
scripts/benchmark_networks.py measures.

Shapes: B columns of the text, T time steps of a segment, N = B·T tokens of one step, E embedding, D the last layer's
units, K components, V vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
from argparse import Namespace
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from mixtape_plugin.analysis.benchmark import (
    Setting,
    available_memory,
    high_water_mark,
    in_fresh_process,
    memory_errors,
    stopwatch,
    take_turns,
)
from mixtape_plugin.criterions.awd_lstm_cross_entropy import AWDLSTMCrossEntropy
from mixtape_plugin.data.bptt_dataset import BpttDataset, TokenStream
from mixtape_plugin.models.awd_lstm_lm import count_parameters, parse_hidden_sizes
from mixtape_plugin.optim.nt_asgd import NTASGD, NTASGDConfig
from mixtape_plugin.output_layers import base

CLIP_NORM, WEIGHT_DECAY, LR = 0.25, 1.2e-6, 1.0  # the papers', but for the learning rate, whose value takes no time
SIZES = ("same", "own")
TINY = {"vocab_size": 20, "embed_dim": 2, "hidden_sizes": "2,2", "batch_size": 2, "segment_length": 2}


class TextShape(NamedTuple):
    """Sizes of a text, and of the networks that model it."""

    shape: str  # its name
    arch: str  # of the softmax network; the mixtures' are named after it
    vocab_size: int  # without masked tokens
    batch_size: int  # B
    segment_length: int  # T
    layers: tuple  # compared by default
    embed_dim: int | None = None  # of all networks, instead of the architectures' own
    hidden_sizes: str | None = None


TABLE_3 = ("softmax", "mos-3", "mos-5", "mos-10", "mos-15", "mixtape", "mixtape-no-sharing")
WITH_MOC = ("softmax", "moc-15", "mos-15", "mixtape", "mixtape-no-sharing")
SHAPES = {
    shape.shape: shape
    for shape in (  # batches and segments of the MoS paper
        TextShape("ptb", "awd_lstm_lm_ptb", 10000, 12, 70, TABLE_3),
        TextShape("wikitext2", "awd_lstm_lm_wikitext2", 33278, 15, 70, WITH_MOC),
        TextShape(
            "one-billion", "awd_lstm_lm_one_billion", 100000, 60, 35, ("softmax", "mos-7", "mixtape", TABLE_3[-1])
        ),
    )
}

# "Out layer" and "all layers" at the same batch size, Mixtape (Yang et al. 2019), tables 3 and 4
PAPER_TIMES = {
    "ptb": {
        "softmax": (14, 328),
        "mos-3": (147, 439),
        "mos-5": (173, 488),
        "mos-10": (242, 609),
        "mos-15": (310, 731),
        "mixtape": (27, 345),
        "mixtape-no-sharing": (95, 487),
    },
    "one-billion": {
        "softmax": (53, 119),
        "mos-7": (794, 856),
        "mixtape": (114, 170),
        "mixtape-no-sharing": (364, 414),
    },
}

# of a benchmark's rows; times in ms, memory in MB (10^6 bytes), ratios to softmax, shares of the step
COLUMNS = (
    *("shape", "layer", "arch", "vocab_size", "embed_dim", "hidden_sizes", "batch_size", "segment_length"),
    *("parameters", "ms_median", "ms_min", "ms_max", "tokens_per_second", "time_ratio", "paper_ratio"),
    *("output_ms_median", "output_ms_min", "output_ms_max", "output_share", "paper_output_share"),
    *("peak_memory_mb", "skipped"),
)


def paper_ratio(layer: str, shape: TextShape) -> float | None:
    """Time of the network over that of softmax in the Mixtape paper, where it has both."""
    times = PAPER_TIMES.get(shape.shape, {})
    return times[layer][1] / times["softmax"][1] if layer in times else None


def paper_output_share(layer: str, shape: TextShape) -> float | None:
    """Share of the output layer in the time of the network in the Mixtape paper, where it has both."""
    times = PAPER_TIMES.get(shape.shape, {})
    return times[layer][0] / times[layer][1] if layer in times else None


def network_args(layer: str, shape: TextShape, sizes: str = "same") -> Namespace:
    """The options of a layer's network.

    Args:
        layer: softmax, moc-K, mos-K, mixtape or mixtape-no-sharing.
        sizes: ``own``: those of each layer's architecture, as one would train it; ``same``: MoS's for all, so that
            networks differ in the output layer only. The last layer of softmax, which is tied and has no projection,
            is then E wide.
    """
    kind, _, variant = layer.partition("-")
    args = Namespace()
    if kind in ("moc", "mos"):
        args.output_layer, args.num_components = kind, int(variant)
    elif variant == "no-sharing":
        args.frequent_ratio = 1.0
    args.arch = shape.arch + {"softmax": "", "mixtape": "_mixtape"}.get(kind, "_mos")
    if shape.hidden_sizes:
        common = shape
    elif sizes == "same":
        common = Namespace()
        ARCH_CONFIG_REGISTRY[shape.arch + "_mos"](common)
    else:
        common = None
    if common:
        hidden_sizes = parse_hidden_sizes(common.hidden_sizes)
        if kind == "softmax":
            hidden_sizes[-1] = common.embed_dim
        args.embed_dim, args.hidden_sizes = common.embed_dim, ",".join(map(str, hidden_sizes))
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


def build_network(layer: str, shape: TextShape, sizes: str = "same"):
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


class TrainingStep:
    """What fairseq-train does with a segment: the network with all its dropouts and noises, loss with activation
    penalties, backward, clipping, SGD. The text is random.
    """

    def __init__(self, layer: str, shape: TextShape, setting: Setting, sizes: str = "same"):
        self.device = setting.device
        self.model, task = build_network(layer, shape, sizes)
        self.model.to(setting.device)
        self.criterion = AWDLSTMCrossEntropy(task, sentence_avg=False)
        self.optimizer = NTASGD(NTASGDConfig(lr=[LR], weight_decay=WEIGHT_DECAY), list(self.model.parameters()))
        dictionary = task.target_dictionary
        predicted = torch.tensor([n for n in range(len(dictionary)) if n not in task.masked_tokens])
        text = predicted[torch.randint(len(predicted), (shape.batch_size * shape.segment_length,))]
        stream = TokenStream(text, dictionary.eos(), dictionary.pad(), "train")
        self.sample = BpttDataset(stream, shape.batch_size, shape.segment_length, training=True)[0]
        for batch in (self.sample, self.sample["net_input"]):
            batch.update({name: part.to(setting.device) for name, part in batch.items() if torch.is_tensor(part)})

    def __call__(self) -> float:
        """Takes the step and returns its seconds."""
        with stopwatch(self.device) as elapsed:
            loss, sample_size, _ = self.criterion(self.model, self.sample)
            self.optimizer.backward(loss)
            self.optimizer.multiply_grads(1 / sample_size)
            self.optimizer.clip_grad_norm(CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return elapsed[0]

    def output_layer(self) -> float:
        """Seconds of the output layer's part alone: its loss, and the gradients of features and parameters.

        Its weights stay as they are. Clipping and updating them is not counted, here or in the paper.
        """
        layer, target = self.model.decoder.output_projection, self.sample["target"]
        features = torch.randn(*target.shape, layer.feature_dim, device=self.device, requires_grad=True)
        with stopwatch(self.device) as elapsed:
            layer.loss(features, target, ignore_index=self.criterion.padding_idx)[0].backward()
        self.optimizer.zero_grad()
        return elapsed[0]


def peak_memory(layer: str, shape: TextShape, setting: Setting, sizes: str = "same") -> int:
    """Bytes of a training at its peak, the second step included: weights, gradients, and all that a step holds. What
    torch itself takes with its first step is left out.

    Raises:
        MemoryError: there is too little.
    """
    torch.set_num_threads(setting.threads)
    TrainingStep(layer, shape._replace(**TINY), setting)()
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = high_water_mark(setting.device)
    with memory_errors():
        step = TrainingStep(layer, shape, setting, sizes)
        step()
        step()
    return high_water_mark(setting.device) - before


def estimate_memory(layer: str, shape: TextShape, sizes: str = "same") -> int:
    """Bytes that a training needs at most: weights, gradients and the update three times over, 16 numbers for each
    unit and token, 8 for each score that the output layer holds at once, 100 MB for the program."""
    # weights without values, where torch has them
    with torch.device("meta") if hasattr(torch.device, "__enter__") else contextlib.nullcontext():
        model, _ = build_network(layer, shape, sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = shape.batch_size * shape.segment_length
    units = sum(part.hidden_size for part in model.decoder.layers) + model.decoder.embed_tokens.embedding_dim
    scores = min(tokens * model.decoder.output_projection.scores_per_token, base.MAX_SCORES)
    return 4 * (4 * parameters + 16 * tokens * units + 8 * scores) + 10**8


def benchmark(
    shape: TextShape,
    layers,
    setting: Setting,
    rounds: int,
    sizes: str = "same",
    memory_limit=None,
    tick=lambda steps: None,
) -> list:
    """Measures the networks at one shape: peak memory first, then time, by :func:`take_turns`, each network's step
    and then its output layer's part of it.

    Args:
        layers: softmax, moc-K, mos-K, mixtape, mixtape-no-sharing.
        memory_limit: bytes; a network that needs more by :func:`estimate_memory` is skipped (default: what is free).
        tick: called with the number of turns done, of 2·`rounds` + 3 for each network.

    Returns:
        a dict of :data:`COLUMNS` for each network; None for what was not measured.
    """
    limit = available_memory(setting.device) if memory_limit is None else memory_limit
    torch.set_num_threads(setting.threads)
    rows, steps = [], {}
    for layer in layers:
        args = network_args(layer, shape, sizes)
        row = dict.fromkeys(COLUMNS)
        row.update({name: value for name, value in shape._asdict().items() if name in COLUMNS})
        row.update(layer=layer, arch=args.arch, embed_dim=args.embed_dim, hidden_sizes=args.hidden_sizes)
        row["paper_ratio"] = paper_ratio(layer, shape)
        row["paper_output_share"] = paper_output_share(layer, shape)
        rows.append(row)
        estimate = estimate_memory(layer, shape, sizes)
        measure = (layer, shape, setting, sizes)
        needs = f"fit in {limit / 1e9:.3g} GB, estimated at {estimate / 1e9:.3g} GB"
        if estimate > limit:
            row["skipped"] = f"does not {needs}"
        else:
            try:
                peak = peak_memory(*measure) if setting.device == "cuda" else in_fresh_process(peak_memory, *measure)
                row["peak_memory_mb"] = peak / 1e6
                step = TrainingStep(*measure)
                row["parameters"] = count_parameters(step.model)
                steps[layer, "network"], steps[layer, "output layer"] = step, step.output_layer
            except MemoryError:
                row["skipped"] = f"did not {needs}"
        tick(2 * rounds + 3 if row["skipped"] else 1)

    times = take_turns(steps, rounds, tick)
    for row in rows:
        if row["skipped"]:
            continue
        network, output = times[row["layer"], "network"], times[row["layer"], "output layer"]
        median, output_median = statistics.median(network), statistics.median(output)
        row.update(ms_median=median, ms_min=min(network), ms_max=max(network))
        row.update(output_ms_median=output_median, output_ms_min=min(output), output_ms_max=max(output))
        row["tokens_per_second"] = 1000 * shape.batch_size * shape.segment_length / median
        row["output_share"] = output_median / median
        if ("softmax", "network") in times:
            row["time_ratio"] = median / statistics.median(times["softmax", "network"])
    return rows
