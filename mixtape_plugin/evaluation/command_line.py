"""What the command lines of dynamic evaluation and the cache pointer share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Iterable

import torch
from tqdm import tqdm

from mixtape_plugin.errors import UserError


def evaluation_parser(
    description: str, datasets: Iterable[str], segment_length: int, segment_help: str, searched: str, out: str
) -> argparse.ArgumentParser:
    """A parser with the options of both.

    Args:
        description: the script's docstring.
        datasets: names of those with hyper-parameters of their own, ``ptb`` among them.
        segment_length: default of ``--segment-length``, which ``segment_help`` explains.
        searched: what ``--search`` chooses.
        out: default folder of ``--search``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder that fairseq-preprocess wrote")
    parser.add_argument("--path", required=True, help="checkpoint of --arch awd_lstm_lm")
    parser.add_argument("--subset", default="test", help="split to score (default: %(default)s)")
    parser.add_argument(
        "--dataset", choices=datasets, default="ptb", help="whose hyper-parameters to use (default: %(default)s)"
    )
    parser.add_argument(
        "--segment-length", type=int, default=segment_length, help=f"{segment_help} (default: %(default)s)"
    )
    parser.add_argument("--search", action="store_true", help=f"choose {searched} on the validation text")
    parser.add_argument("--out", type=Path, help=f"folder of --search (default: {out})")
    parser.set_defaults(default_out=Path(out))
    parser.add_argument("--cpu", action="store_true", help="use the CPU where there is a GPU, too")
    return parser


def take_paper_settings(args: argparse.Namespace, settings: dict) -> None:
    """Fills in the hyper-parameters that were not given, from those of --dataset."""
    for name, value in settings[args.dataset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def check_search(args: argparse.Namespace, grids: Iterable[str], chosen: dict) -> None:
    """Raises UserError for an option that has no effect; before defaults are filled in.

    Args:
        grids: options that only ``--search`` looks at.
        chosen: option -> its grid, which takes its place in ``--search``.
    """
    for name in [*grids, "out"]:
        if getattr(args, name) is not None and not args.search:
            raise UserError(f"--{name.replace('_', '-')} {shown(getattr(args, name))} needs --search")
    for name, grid in chosen.items():
        if getattr(args, name) is not None and args.search:
            raise UserError(
                f"--{name.replace('_', '-')} {shown(getattr(args, name))} does not go with --search, which chooses it: "
                f"give --{grid.replace('_', '-')}"
            )
    args.out = args.out or args.default_out


def shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def device(args: argparse.Namespace) -> str:
    return "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"


def progress_bar(name: str, tokens: int) -> tqdm:
    return tqdm(total=tokens, desc=name, unit="tok", mininterval=0.5 if sys.stderr.isatty() else 10)
