#!/usr/bin/env python3
"""Dynamic evaluation (Krause et al. 2017) of an AWD-LSTM language model: it goes on learning from the test text.

    python scripts/dynamic_evaluation.py data-bin/ptb --path checkpoints/checkpoint_best.pt --dataset ptb
    python scripts/dynamic_evaluation.py data-bin/ptb --path checkpoints/checkpoint_best.pt --dataset ptb --search

One walk through the training text collects the size of each parameter's gradients; then the test text is scored
segment by segment, and after each segment all parameters move by its gradient, and back towards their trained values.
Prints the static perplexity and the dynamic one. The checkpoint is only read.

--search tries all pairs of --learning-rates and --decays on the validation text, prints them as a table, writes them
to search.csv and search.png in --out, and scores the test text with the best.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from itertools import product
from typing import Sequence

import start
from fairseq.tasks import FairseqTask

from mixtape_plugin.errors import UserError, check_values
from mixtape_plugin.evaluation import grid_search
from mixtape_plugin.evaluation.command_line import (
    check_search,
    device,
    evaluation_parser,
    progress_bar,
    take_paper_settings,
)
from mixtape_plugin.evaluation.dynamic_evaluation import (
    PAPER_SETTINGS,
    GradientStatistics,
    dynamic_evaluation,
    gradient_statistics,
    gradients_without_dropout,
)
from mixtape_plugin.evaluation.language_model import load_language_model, perplexity, text
from mixtape_plugin.files import make_folder
from mixtape_plugin.models.awd_lstm_lm import AWDLSTMLanguageModel

FACTORS = (0.5, 0.75, 1, 1.5)  # of the paper's η and λ: the grid of --search


def parse_args(argv: Sequence[str] | None) -> Namespace:
    parser = evaluation_parser(
        __doc__, PAPER_SETTINGS, 5, "tokens between updates", "η and λ", "dynamic_evaluation_run"
    )
    parser.add_argument("--learning-rate", type=float, help="η (the paper's: .002)")
    parser.add_argument("--decay", type=float, help="λ (the paper's: ptb .075, wikitext2 .02)")
    parser.add_argument("--epsilon", type=float, help="ε (the paper's: ptb .001, wikitext2 .002)")
    parser.add_argument(
        "--batch-size", type=int, default=100, help="columns for the gradient statistics (default: %(default)s)"
    )
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", help="grid of --search (default: η times .5, .75, 1 and 1.5)"
    )
    parser.add_argument("--decays", type=float, nargs="+", help="grid of --search (default: λ times the same)")
    parser.add_argument("--search-tokens", type=int, help="search on so many first tokens (default: all)")
    args = parser.parse_args(argv)
    given = {"learning_rate": "learning_rates", "decay": "decays"}  # of which the grid is made where it is not given
    chosen = {name: grid for name, grid in given.items() if getattr(args, grid) is not None}
    check_search(args, ("learning_rates", "decays", "search_tokens"), chosen)
    take_paper_settings(args, PAPER_SETTINGS)
    args.learning_rates = args.learning_rates or [factor * args.learning_rate for factor in FACTORS]
    args.decays = args.decays or [factor * args.decay for factor in FACTORS]
    check(args)
    return args


def check(args: Namespace) -> None:
    """Raises UserError for the first option whose value is not allowed."""
    allowed = {
        "learning_rate": (args.learning_rate >= 0, "0 or more"),
        "decay": (args.decay >= 0, "0 or more"),
        "epsilon": (args.epsilon > 0, "more than 0"),
        "segment_length": (args.segment_length >= 1, "at least 1"),
        "batch_size": (args.batch_size >= 1, "at least 1"),
        "learning_rates": (min(args.learning_rates) >= 0, "0 or more, each"),
        "decays": (min(args.decays) >= 0, "0 or more, each"),
        "search_tokens": (args.search_tokens is None or args.search_tokens >= 1, "at least 1"),
    }
    check_values(args, allowed)


def search(
    args: Namespace, model: AWDLSTMLanguageModel, task: FairseqTask, statistics: GradientStatistics
) -> list[dict]:
    """A row for each pair of η and λ, scored on the validation text."""
    tokens = min(len(text(task, "valid")), args.search_tokens or sys.maxsize)
    grid = list(product(args.learning_rates, args.decays))
    rows = []
    with progress_bar("search", len(grid) * tokens) as bar:
        for learning_rate, decay in grid:
            score = dynamic_evaluation(
                model, task, "valid", statistics, learning_rate, decay, args.epsilon, args.segment_length,
                args.search_tokens, bar.update,
            )  # fmt: skip
            rows.append(
                {"learning rate": learning_rate, "decay": decay, "perplexity": score.perplexity, "tokens": score.tokens}
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if os.pathsep in args.data:
        raise UserError(f"{args.data} is not allowed: one folder, since the gradients are of the whole training text")
    model, task = load_language_model(args.path, args.data)
    if args.search:
        make_folder(args.out)
        text(task, "valid")  # a split that is missing, before anything takes time
    model.to(device(args))
    tokens, train_tokens = len(text(task, args.subset)), len(text(task, "train"))

    with progress_bar("static", tokens) as bar, gradients_without_dropout(model):  # the same LSTM kernel
        static = perplexity(model, task, args.subset, length=args.segment_length, progress=bar.update)
    print(f"{args.subset}: {static.tokens:,} tokens, static perplexity {static.perplexity:.3f}", flush=True)

    with progress_bar("gradients", train_tokens) as bar:
        statistics = gradient_statistics(
            model, task, "train", args.batch_size, args.segment_length, progress=bar.update
        )
    print(
        f"gradient statistics: {statistics.tokens:,} of {train_tokens:,} training tokens, "
        f"{statistics.batches:,} batches of {args.batch_size} x {args.segment_length}",
        flush=True,
    )

    if args.search:
        rows = search(args, model, task, statistics)
        grid_search.save(rows, args.out, "learning rate", "decay", "dynamic evaluation, valid")
        winner = grid_search.best(rows)
        args.learning_rate, args.decay = winner["learning rate"], winner["decay"]
        print(f"\nvalid:\n{grid_search.table(rows)}\n\nTable and heat map: {args.out}/search.csv, search.png\n")

    with progress_bar("dynamic", tokens) as bar:
        dynamic = dynamic_evaluation(
            model, task, args.subset, statistics, args.learning_rate, args.decay, args.epsilon, args.segment_length,
            progress=bar.update,
        )  # fmt: skip
    if math.isinf(dynamic.perplexity):
        raise UserError(
            f"dynamic evaluation diverged after {dynamic.tokens:,} of {tokens:,} tokens: lower --learning-rate "
            f"{args.learning_rate:g}"
        )
    print(
        f"{args.subset}: {dynamic.tokens:,} tokens, dynamic perplexity {dynamic.perplexity:.3f} "
        f"(learning rate {args.learning_rate:g}, decay {args.decay:g}, epsilon {args.epsilon:g}, "
        f"segments of {args.segment_length})"
    )


if __name__ == "__main__":
    start.run(main)
