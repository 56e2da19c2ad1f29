"""Time and memory of one training step of each output layer: what scripts/benchmark_output_layers.py measures.

Shapes: D features, E embedding, K components, V vocabulary, S frequent tokens, N tokens (of one step).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from mixtape_plugin.output_layers import OutputLayerConfig, build_output_layer

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
        Shape("en-de-512", 32000, 512, 512, 9, 0.5, 1024),
    )
}

# "Out layer" at the same batch size, Mixtape (Yang et al. 2019), tables 3 to 5
PAPER_TIMES = {
    "ptb": {"softmax": 14, "mos": 310, "mixtape": 27, "mixtape-no-sharing": 95},
    "one-billion": {"softmax": 53, "mos": 794, "mixtape": 114, "mixtape-no-sharing": 364},
    "en-de": {"softmax": 2.16, "mos": 14.36, "mixtape": 5.83},
}

# of the papers' training runs; a shape without an entry has the gate noise alone
LOCKED = {"context_dropout": 0.29, "locked_context_dropout": True}  # of the MoS paper's code, for every mixture
PAPER_NOISE = {"ptb": LOCKED, "en-de": {"gate_dropout": 0.2}, "en-de-512": {"gate_dropout": 0.2}}


# of a benchmark's rows; times in ms, memory in MB (10^6 bytes), ratios to softmax
COLUMNS = (
    *("shape", "vocab_size", "embed_dim", "feature_dim", "num_components", "frequent_ratio", "tokens", "layer"),
    *("ms_median", "ms_min", "ms_max", "time_ratio", "flop_ratio", "paper_ratio"),
    *("peak_memory_mb", "parameters", "skipped"),
)


class Setting(NamedTuple):
    """How to run, the same for every layer and shape."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    noise: bool = False


def num_components(layer: str, shape: Shape) -> int:
    """K of the layer."""
    return {"softmax": 1, "moc": shape.num_components, "mos": shape.num_components}.get(layer, 4)


def num_frequent(layer: str, shape: Shape) -> int:
    """S of mixtape."""
    return shape.vocab_size if layer == "mixtape-no-sharing" else round(shape.frequent_ratio * shape.vocab_size)


def multiply_adds(layer: str, shape: Shape, projected: bool = False) -> int:
    """Multiply-adds a token of the layer's matrix products, forward; forward and backward are 6 times as many FLOPs.

    softmax V·E; MoC V·E + K·E·D; MoS K·V·E + K·E·D; Mixtape V·E + 3·S·E + 4·E·D + 3·d2·(S + D). Left out are the
    priors, the shared gates and all that is no matrix product.

    Args:
        projected: count the D to E projection that softmax needs to start from the mixtures' features.
    """
    v, e, d = shape.vocab_size, shape.embed_dim, shape.feature_dim
    k, s = num_components(layer, shape), num_frequent(layer, shape)
    return {
        "softmax": v * e + (e * d if projected else 0),
        "moc": v * e + k * e * d,
        "mos": k * v * e + k * e * d,
        "mixtape": v * e + 3 * s * e + k * e * d + 3 * GATE_DIM * (s + d),
    }[layer.split("-")[0]]


def count_parameters(layer: str, shape: Shape) -> int:
    """Parameters of the layer, its embedding included."""
    v, e, d = shape.vocab_size, shape.embed_dim, shape.feature_dim
    k, s = num_components(layer, shape), num_frequent(layer, shape)
    count = v * (e + 1)
    if layer != "softmax":
        count += k * e * (d + 1)
    if layer in ("moc", "mos"):
        count += k * d
    elif layer.startswith("mixtape"):
        count += (k - 1) * (GATE_DIM * (d + 1) + d + s) + s * GATE_DIM
    return count


def paper_ratio(layer: str, shape: Shape) -> float | None:
    """Time of the layer over that of softmax in the Mixtape paper, where it has both."""
    times = PAPER_TIMES.get(shape.shape, {})
    return times[layer] / times["softmax"] if layer in times else None


def build_layer(layer: str, shape: Shape, noise: bool = False, tied_weight=None):
    """The eager layer of this shape, in training mode; raises UserError where K or r is not allowed."""
    config = OutputLayerConfig(
        output_layer=layer.split("-")[0],
        num_components=num_components(layer, shape),
        output_embed_dim=shape.embed_dim,
        gate_dim=GATE_DIM,
        frequent_ratio=1.0 if layer == "mixtape-no-sharing" else shape.frequent_ratio,
        gate_noise=0.1 if noise else 0.0,
        output_impl="eager",
        **(PAPER_NOISE.get(shape.shape, {}) if noise else {}),
    )
    feature_dim = shape.embed_dim if layer == "softmax" else shape.feature_dim
    return build_output_layer(config, feature_dim, shape.vocab_size, tied_weight).train()


@contextlib.contextmanager
def stopwatch(device: str):
    """Seconds of the block, the only element of the list it gives once the block, and all on the GPU, is done."""
    seconds = []
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    yield seconds
    if device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


class Step:
    """One forward and backward pass of a layer, `loss` to the gradients of features and parameters."""

    def __init__(self, layer: str, shape: Shape, setting: Setting, tied_weight=None):
        self.device = setting.device
        place = {"device": setting.device, "dtype": getattr(torch, setting.dtype)}
        self.layer = build_layer(layer, shape, setting.noise, tied_weight).to(**place)
        # [1, N, D] and not [N, D] because locked dropout needs a time dimension
        self.features = torch.randn(1, shape.tokens, self.layer.feature_dim, **place)
        self.target = torch.randint(shape.vocab_size, (1, shape.tokens), device=setting.device)

    def __call__(self, tokens: int | None = None) -> float:
        """Runs the step on the first `tokens` (default: all) and returns its seconds."""
        features = self.features[:, :tokens].detach().requires_grad_()
        target = self.target[:, :tokens]
        with stopwatch(self.device) as elapsed:
            self.layer.loss(features, target)[0].backward()
        for parameter in self.layer.parameters():
            parameter.grad = None  # as fairseq does: the next backward allocates, and does not add
        return elapsed[0]


def high_water_mark(device: str) -> int:
    """Bytes held at most so far: by this process, or on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # where ru_maxrss begins at the size of the process that started this one
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def peak_memory(layer: str, shape: Shape, setting: Setting) -> int:
    """Bytes that a step on N tokens holds at its peak beyond one on 16: weights and their gradients don't count.

    Raises:
        MemoryError: there is too little.
    """
    torch.set_num_threads(setting.threads)
    with memory_errors():
        step = Step(layer, shape, setting)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step(TINY)
        tiny = high_water_mark(setting.device)
        step()
    return high_water_mark(setting.device) - tiny


@contextlib.contextmanager
def memory_errors():
    """MemoryError for what torch says where there is too little memory."""
    try:
        yield
    except RuntimeError as error:  # torch has several words for it, on a CPU and on a GPU
        if "allocate" in str(error):
            raise MemoryError from None
        raise


def in_fresh_process(function, *args):
    """``function(*args)`` of a process that has run nothing else, which a CPU's high-water mark needs.

    Raises:
        MemoryError: the function does, or the system ends the process, as it does with what takes too much.
    """
    context = multiprocessing.get_context("forkserver")  # imports once, then forks before any layer has run
    # torch 2 imports the second with the first optimizer, which takes seconds; where it is missing it is left out
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool:
        raise MemoryError from None


def peak_memory_of_fresh_process(layer: str, shape: Shape, setting: Setting) -> int:
    return in_fresh_process(peak_memory, layer, shape, setting)


def estimate_memory(layer: str, shape: Shape, setting: Setting) -> int:
    """Bytes that a step of the eager layer needs at most: weights, their gradients, and N·values of 4 bytes or more.

    Values of a token, at the peak on a CPU with some to spare: softmax and MoC 5·V, MoS 5·(K+1)·V, Mixtape 5·V + 25·S.
    """
    values = 5 * shape.vocab_size
    if layer == "mos":
        values *= shape.num_components + 1
    elif layer.startswith("mixtape"):
        values += 25 * num_frequent(layer, shape)
    size = torch.finfo(getattr(torch, setting.dtype)).bits // 8
    return 2 * size * count_parameters(layer, shape) + max(4, size) * shape.tokens * values


def available_memory(device: str) -> int:
    """Bytes that are free now: on the GPU, or on the machine and at most what a container allows."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path) as file:
                limit = file.read().strip()
            free = free if limit == "max" else min(free, int(limit))
    return free


def take_turns(steps: dict, rounds: int, tick=lambda steps: None) -> dict:
    """Milliseconds of the steps, a list under each one's key. After a warm-up, each of them takes its turn in each of
    the rounds, so that whatever else the machine does meets them all alike.

    Args:
        steps: functions that return their seconds.
        tick: called with 1 after each turn.
    """
    times = {key: [] for key in steps}
    for turn in range(rounds + 1):
        for key, step in steps.items():
            seconds = step()
            if turn:  # the first round is the warm-up
                times[key].append(1000 * seconds)
            tick(1)
    return times


def benchmark(shape: Shape, layers, setting: Setting, rounds: int, memory_limit=None, tick=lambda steps: None) -> list:
    """Measures the layers at one shape: peak memory first, then time, by :func:`take_turns`.

    Args:
        layers: some of :data:`LAYERS`, softmax among them.
        memory_limit: bytes; a layer that needs more by :func:`estimate_memory` is skipped (default: what is free).
        tick: called with the number of turns done, of `rounds` + 2 for each layer.

    Returns:
        a dict of :data:`COLUMNS` for each layer; None for what was not measured.
    """
    limit = available_memory(setting.device) if memory_limit is None else memory_limit
    torch.set_num_threads(setting.threads)
    rows, run = [], {}
    for layer in layers:
        row = dict.fromkeys(COLUMNS)
        row.update(shape._asdict(), layer=layer, parameters=count_parameters(layer, shape))
        row["num_components"] = num_components(layer, shape)
        row["feature_dim"] = shape.embed_dim if layer == "softmax" else shape.feature_dim
        row["frequent_ratio"] = num_frequent(layer, shape) / shape.vocab_size if "mixtape" in layer else None
        row["flop_ratio"] = multiply_adds(layer, shape) / multiply_adds("softmax", shape)
        row["paper_ratio"] = paper_ratio(layer, shape)
        rows.append(row)
        estimate = estimate_memory(layer, shape, setting)
        measure = peak_memory if setting.device == "cuda" else peak_memory_of_fresh_process
        sizes = f"fit in {limit / 1e9:.3g} GB, estimated at {estimate / 1e9:.3g} GB"
        if estimate > limit:
            row["skipped"] = f"does not {sizes}"
        else:
            try:
                row["peak_memory_mb"] = measure(layer, shape, setting) / 1e6
                run[layer] = row
            except MemoryError:
                row["skipped"] = f"did not {sizes}"
        tick(1 if layer in run else rounds + 2)

    embedding = torch.nn.Parameter(torch.empty(shape.vocab_size, shape.embed_dim)) if run else None
    if run:
        torch.nn.init.normal_(embedding, std=shape.embed_dim**-0.5)
    # one embedding for all: five of One Billion Word's would take 2 GB
    steps = {layer: Step(layer, shape, setting, embedding) for layer in run}
    times = take_turns(steps, rounds, tick)
    for layer, row in run.items():
        row.update(ms_median=statistics.median(times[layer]), ms_min=min(times[layer]), ms_max=max(times[layer]))
        if "softmax" in run:
            row["time_ratio"] = row["ms_median"] / statistics.median(times["softmax"])
    return rows
