#!/usr/bin/env python3
"""Average the parameters of several fairseq checkpoints into one that fairseq-generate, -validate and -eval-lm load.

    python scripts/average_checkpoints.py --last 5 checkpoints/en-de --output checkpoints/en-de/average.pt
    python scripts/average_checkpoints.py --inputs a.pt b.pt --output average.pt

Sums in float64, and keeps the type of each parameter. Everything else (options, task) is that of the last checkpoint;
the optimizer's state is left out, so that the result is one to evaluate or to start from, not to resume.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Sequence

import start
import torch
from fairseq import checkpoint_utils
from omegaconf import OmegaConf

import mixtape_plugin
from mixtape_plugin.errors import UserError
from mixtape_plugin.files import check_outputs, check_place, write_whole, writing

PATTERNS = {"epochs": re.compile(r"checkpoint(\d+)\.pt"), "updates": re.compile(r"checkpoint_\d+_(\d+)\.pt")}


def last_checkpoints(folder: str, count: int, by: str = "epochs") -> list[str]:
    """The `count` latest checkpoints of a folder, oldest first: by epochs, or those saved every so many updates.

    Raises:
        UserError: `count` is not positive, or the folder has fewer.
    """
    if count < 1:
        raise UserError(f"--last {count} is not allowed: 1 or more")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = sorted((int(match[1]), name) for name in names for match in [PATTERNS[by].fullmatch(name)] if match)
    if len(found) < count:
        pattern = {"epochs": "checkpointE.pt", "updates": "checkpoint_E_U.pt"}[by]
        raise UserError(
            f"--last asks for {count} checkpoints, and {folder} has {len(found)} named {pattern}: name fewer, the "
            "other kind by --by, or train without --no-epoch-checkpoints or with --save-interval-updates"
        )
    return [os.path.join(folder, name) for _, name in found[-count:]]


def load(path: str) -> dict:
    """A checkpoint on the CPU, read by fairseq with the plugin's allow-list.

    Raises:
        UserError: the file is missing, truncated, not safe to load, or no fairseq checkpoint.
    """
    try:
        return checkpoint_utils.load_checkpoint_to_cpu(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def average(paths: Sequence[str]) -> dict:
    """The last checkpoint, its parameters replaced by their mean over all of them.

    Floating-point tensors are summed in float64 and keep their type; others (marks of a version) must be equal. What is
    one tensor in the checkpoint (tied embeddings) stays one. Memory: the float64 sums and one checkpoint at a time.

    Raises:
        UserError: a checkpoint cannot be loaded, or its parameters differ from the first's in names, types or shapes.
    """
    kinds, sums = {}, {}
    for path in paths:
        state = load(path)
        model = state["model"]
        if not all(isinstance(value, torch.Tensor) for value in model.values()):
            raise UserError(f"{path} holds something else than tensors under 'model'")
        if not kinds:
            kinds = {name: (value.dtype, tuple(value.shape)) for name, value in model.items()}
            sums = {
                n: torch.zeros_like(v, dtype=torch.float64) if v.is_floating_point() else v for n, v in model.items()
            }
        for name in sorted(kinds.keys() | model.keys()):
            kind = (model[name].dtype, tuple(model[name].shape)) if name in model else "missing"
            if kind != kinds.get(name, "missing"):
                raise UserError(
                    f"{path} holds another model than {paths[0]}: {name} is {kind} and {kinds.get(name, 'missing')}"
                )
            if model[name].is_floating_point():
                sums[name] += model[name]
            elif not torch.equal(sums[name], model[name]):
                raise UserError(f"{path} differs from {paths[0]} in {name}, of {kind[0]}, which has no average")

    averages = {}  # by place in memory, so that tied parameters stay one tensor
    for name, value in model.items():
        place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        mean = (sums[name] / len(paths)).to(value.dtype) if value.is_floating_point() else value
        model[name] = averages.setdefault(place, mean)
        if model[name] is not mean and not torch.equal(model[name], mean):
            raise UserError(f"{name} is tied to another parameter in {paths[-1]} and not in every checkpoint before it")
    state["last_optimizer_state"] = None
    if OmegaConf.is_config(state.get("cfg")):  # back to the plain dict that fairseq saves
        state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    return state


def save(state: dict, path: str) -> None:
    with open(path, "wb") as file:  # given a path, torch would tell of a full disk without an OSError
        torch.save(state, file)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--inputs", nargs="+", action="extend", metavar="FILE", help="the checkpoints")
    which.add_argument("--last", nargs=2, metavar=("N", "DIR"), help="the last N checkpoints of a training's folder")
    parser.add_argument("--by", choices=list(PATTERNS), help="--last: checkpoints of epochs (default) or of updates")
    parser.add_argument("--output", required=True, metavar="FILE", help="the checkpoint to write")
    args = parser.parse_args(argv)
    mixtape_plugin.register()  # which repairs fairseq's loading of checkpoints

    paths = args.inputs
    if args.last:
        count, folder = args.last
        if not re.fullmatch(r"-?\d+", count):
            raise UserError(f"--last {count} is not allowed: a whole number, then a folder")
        paths = last_checkpoints(folder, int(count), args.by or "epochs")
    elif args.by:
        raise UserError(f"--by {args.by} needs --last: --inputs names the checkpoints")
    if not args.output or os.path.isdir(args.output):
        raise UserError(f"--output '{args.output}' is not allowed: the name of a file")
    check_outputs({"--output": args.output}, paths)
    check_place("--output", args.output)
    state = average(paths)
    with writing("--output", args.output):
        write_whole(args.output, lambda part: save(state, part))
    print(f"{args.output}: average of " + ", ".join(os.path.basename(path) for path in paths))


if __name__ == "__main__":
    start.run(main)
