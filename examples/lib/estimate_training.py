"""How train.sh spreads an update over GPUs, and what a training takes: time, memory, disk."""

import shutil
from pathlib import Path
from typing import List, Tuple


def split_update(tokens: int, gpus: int, most: int) -> Tuple[int, int]:
    """An update of `tokens` as gpus x update_freq x max_tokens: (update_freq, max_tokens).

    max_tokens is at most `most`, and there are as few steps as that allows; what does not divide, less than gpus x
    update_freq tokens, is left out. Raises ValueError where nothing is left for a step.
    """
    if gpus > tokens:
        raise ValueError(f"--gpus is {gpus}, more than an update has tokens, {tokens}")
    update_freq = -(-tokens // (gpus * most))
    max_tokens = tokens // (gpus * update_freq)
    if not max_tokens:
        raise ValueError(f"--max-tokens is {most}, too few for an update of {tokens} tokens on {gpus} GPUs")
    return update_freq, max_tokens


def estimate(
    layer: str, parameters: float, multiplications: float, updates: int, gpus: int, update_freq: int, max_tokens: int,
    device: str, bf16: bool, checkpoints: int, save: str, free: float, there: float,
) -> List[str]:  # fmt: skip
    """Sentences on what a training with Adam takes.

    Parameters, and multiplications a token, in millions; GB of disk that are free, and of checkpoints in `save`, which
    will be replaced. Forward and backward are 3 times a multiplication and an addition each. A checkpoint holds the
    weights and Adam's two moments in float32; training the gradients, too, and with bfloat16 a copy of both.
    """
    tokens = gpus * max_tokens * update_freq
    operations = 6e6 * multiplications * tokens * updates
    disk = checkpoints * 12 * parameters / 1000
    devices, times = device if gpus == 1 else f"{device}s", "time" if update_freq == 1 else "times"
    return [
        f"{layer}, about {parameters:.0f} million parameters; {updates} updates of {tokens} tokens, on {gpus} "
        f"{devices} {max_tokens} at once, {update_freq} {times} an update",
        f"time: about {operations:.2g} floating-point operations, which is {operations / 1e14 / 3600:.0f} hours at "
        "100 TFLOP/s in all (computed, not measured)",
        f"memory of each {device}: about {(20 if bf16 else 16) * parameters / 1000:.0f} GB for parameters, gradients "
        f"and Adam, and on top what {max_tokens} tokens need (--max-tokens)",
        f"disk: about {disk:.0f} GB for {checkpoints} checkpoints in {save}; {free:.0f} GB are free"
        + (", WHICH IS TOO LITTLE" if free + there < disk else ""),
    ]


def disk_space(save: str) -> Tuple[float, float]:
    """GB that are free where `save` is or will be, and GB of the checkpoints there, which are replaced in time."""
    parent = Path(save).absolute()
    there = sum(path.stat().st_blocks * 512 for path in parent.rglob("*.pt"))
    while not parent.is_dir():
        parent = parent.parent
    return shutil.disk_usage(parent).free / 1e9, there / 1e9
