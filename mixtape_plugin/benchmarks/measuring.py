"""How benchmarks measure: time in turns, memory in fresh processes, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch

ROOT = Path(__file__).resolve().parents[2]  # the folder that the package is in
# Of a container, cgroups of version 2 and 1: its limit, what it uses of it, and what that is.
CGROUPS = (
    tuple(f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat")),
    tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
)


class Setting(NamedTuple):
    """How to run, the same for every layer and shape."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    noise: bool = False
    label_smoothing: float = 0.0


class Budget(NamedTuple):
    """Of memory: for weights, gradients and all that a step holds."""

    bytes: float
    largest: int = 16  # times the shape's own batch, at most


@contextlib.contextmanager
def stopwatch(device: str) -> Iterator[list]:
    """Seconds of the block, the only element of the list it gives once the block, and all on the GPU, is done."""
    seconds = []
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    yield seconds
    if device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def high_water_mark(device: str) -> int:
    """Bytes held at most so far: by this process, or on the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # where ru_maxrss begins at the size of the process that started this one
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """MemoryError for what torch says where there is too little memory."""
    try:
        yield
    except RuntimeError as error:  # torch has several words for it, on a CPU and on a GPU
        if "alloc" in str(error).lower():
            raise MemoryError from None
        raise


def in_fresh_process(function: Callable, *args) -> Any:
    """``function(*args)`` of a process that has run nothing else, which a CPU's high-water mark needs.

    Raises:
        MemoryError: the function does, or the system ends the process, as it does with what takes too much.
    """
    # what is imported first is found by PYTHONPATH alone, and the package need not be installed
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    context = multiprocessing.get_context("forkserver")  # imports once, then forks before any layer has run
    # torch 2 imports the second with the first optimizer, which takes seconds; where it is missing it is left out
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool:
        raise MemoryError from None


def available_memory(device: str) -> int:
    """Bytes that are free now: on the GPU, with what torch keeps there for reuse, or on the machine and at most what a
    container has left of its limit."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    for limit, used, cache in CGROUPS:
        if os.path.exists(limit) and Path(limit).read_text().strip() != "max":
            taken = int(Path(used).read_text()) - reclaimable(cache)
            free = min(free, max(int(Path(limit).read_text()) - taken, 0))
    return free


def reclaimable(stat: str) -> int:
    """Bytes of files that a container keeps in memory and gives up when it needs them, by its statistics."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", Path(stat).read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def largest_batch(peak: Callable[[int], int], budget: float, start: int, least: int, most: int) -> tuple:
    """The largest batch of `least` to `most` whose peak fits the budget, to within 2%, and that peak; 0 and None where
    none does.

    The batch grows by 4 until it is too large. Memory is about affine in it: the line through the two measured batches
    that come closest to the budget gives the next one to measure, and bisection ends what five of them have not. The
    batch that is returned was measured to fit, and one 2% (or 1) larger was not, unless it is `most`.

    Args:
        peak: bytes of a batch; may raise MemoryError.
    """
    measured, lines = {}, 0
    below, above, guess = least - 1, most + 1, min(max(start, least), most)
    while True:
        try:
            measured[guess] = peak(guess)
        except MemoryError:
            measured[guess] = math.inf
        if measured[guess] <= budget:
            below = guess
        else:
            above = guess
        margin = max(below // 50, 1)
        if above - below <= (margin if above <= most else 1):  # nothing was too large yet: `most` itself is to measure
            return (below, measured[below]) if below >= least else (0, None)
        largest = 4 * below if below >= least else most
        guess = (below + above) // 2 if above <= most else largest
        finite = sorted((abs(size - budget), batch) for batch, size in measured.items() if size < math.inf)
        if len(finite) > 1 and lines < 5:
            one, other = finite[0][1], finite[1][1]
            slope = (measured[one] - measured[other]) / (one - other)
            if slope > 0:
                guess = one + math.floor((budget - measured[one]) / slope)
                lines += guess < largest
        highest = min(largest, most if above > most else above - margin)
        guess = min(max(guess, below + margin), highest)


def peak_or_skip(peak: Callable[[int], int], batch: int, estimate: float, limit: float) -> tuple:
    """Peak memory of a batch and None, or None and why it was skipped.

    Args:
        peak: bytes of a batch; may raise MemoryError.
        estimate: what it needs at most, in bytes; not measured where that is more than the limit.
    """
    sizes = f"fit in {limit / 1e9:.3g} GB, estimated at {estimate / 1e9:.3g} GB"
    if estimate > limit:
        return None, f"does not {sizes}"
    try:
        return peak(batch), None
    except MemoryError:
        return None, f"did not {sizes}"


def take_turns(steps: dict, rounds: int, tick: Callable[[int], object] = lambda steps: None) -> dict:
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


def summary(times: Sequence[float]) -> dict:
    """Columns of a list of milliseconds."""
    return {"ms_median": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
