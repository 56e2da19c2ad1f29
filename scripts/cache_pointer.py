#!/usr/bin/env python3
"""The continuous cache pointer (Grave et al. 2017) over an AWD-LSTM language model: what was said lately is likelier.

    python scripts/cache_pointer.py data-bin/ptb --path checkpoints/checkpoint_best.pt --dataset ptb
    python scripts/cache_pointer.py data-bin/ptb --path checkpoints/checkpoint_best.pt --dataset ptb --search

p = (1-lambda) p_vocab + lambda p_cache, and p_cache(x) ∝ Σ exp(theta h_t·h_i) over those of the last --window
tokens that x followed; h is the last LSTM layer's output. Nothing is trained, and the checkpoint is only read.
Prints the static perplexity and that with the cache.

--search tries all of --weights, --thetas and --windows together on the validation text, prints them as a table, writes
them to search.csv and search.png in --out, and scores the test text with the best.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from typing import Sequence

import start

from mixtape_plugin.errors import check_values
from mixtape_plugin.evaluation import grid_search
from mixtape_plugin.evaluation.cache_pointer import (
    PAPER_SETTINGS,
    Predictions,
    cache_log_probs,
    cache_pointer,
    mix,
    predict_text,
)
from mixtape_plugin.evaluation.command_line import (
    check_search,
    device,
    evaluation_parser,
    progress_bar,
    take_paper_settings,
)
from mixtape_plugin.evaluation.language_model import load_language_model, score, text
from mixtape_plugin.files import make_folder

WEIGHTS = [0.05, 0.1, 0.15, 0.2, 0.3]
THETAS = [0.1, 0.3, 0.66, 1.0, 1.5]
WINDOWS = {"ptb": [100, 500, 2000], "wikitext2": [500, 2000, 3785]}
MAX_THETA = 10**6  # far from where exponents overflow
MAX_WINDOW = 10**9  # more than any text's


def parse_args(argv: Sequence[str] | None) -> Namespace:
    parser = evaluation_parser(
        __doc__, PAPER_SETTINGS, 70, "tokens read at once; changes no result", "all three", "cache_pointer_run"
    )
    parser.add_argument(
        "--weight", "--lambda", type=float, help="lambda, the cache's share (AWD-LSTM's: ptb .1, wikitext2 .1279)"
    )
    parser.add_argument("--theta", type=float, help="sharpness (AWD-LSTM's: ptb 1, wikitext2 .662)")
    parser.add_argument("--window", type=int, help="tokens in the cache (AWD-LSTM's: ptb 500, wikitext2 3785)")
    grids = {"weights": (float, WEIGHTS), "thetas": (float, THETAS), "windows": (int, None)}
    for name, (number, values) in grids.items():
        windows = "; ".join(f"{text} {' '.join(map(str, sizes))}" for text, sizes in WINDOWS.items())
        shown = " ".join(map(str, values)) if values else windows
        parser.add_argument(f"--{name}", type=number, nargs="+", help=f"grid of --search (default: {shown})")
    args = parser.parse_args(argv)
    check_search(args, grids, {"weight": "weights", "theta": "thetas", "window": "windows"})
    take_paper_settings(args, PAPER_SETTINGS)
    args.weights, args.thetas = args.weights or WEIGHTS, args.thetas or THETAS
    args.windows = args.windows or WINDOWS[args.dataset]
    check(args)
    return args


def check(args: Namespace) -> None:
    """Raises UserError for the first option whose value is not allowed."""
    allowed = {
        "weight": (0 <= args.weight < 1, "from 0 to less than 1"),
        "theta": (0 <= args.theta <= MAX_THETA, f"0 to {MAX_THETA:,}"),
        "window": (1 <= args.window <= MAX_WINDOW, f"1 to {MAX_WINDOW:,}"),
        "segment_length": (args.segment_length >= 1, "at least 1"),
        "weights": (all(0 <= weight < 1 for weight in args.weights), "from 0 to less than 1, each"),
        "thetas": (0 <= min(args.thetas) <= max(args.thetas) <= MAX_THETA, f"0 to {MAX_THETA:,}, each"),
        "windows": (1 <= min(args.windows) <= max(args.windows) <= MAX_WINDOW, f"1 to {MAX_WINDOW:,}, each"),
    }
    check_values(args, allowed)


def search(args: Namespace, predictions: Predictions) -> list[dict]:
    """A row for each λ, θ and window; the cache is worked out once for all λ."""
    rows = []
    grid = list(product(args.windows, args.thetas))
    with progress_bar("search", len(grid) * len(predictions.targets)) as bar:
        for window, theta in grid:
            cache = cache_log_probs(predictions.hidden, predictions.targets, theta, window, bar.update)
            for weight in args.weights:
                found = score(mix(predictions.log_probs, cache, weight))
                rows.append(
                    {
                        "window": window,
                        "theta": theta,
                        "weight": weight,
                        "perplexity": found.perplexity,
                        "tokens": found.tokens,
                    }
                )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    model, task = load_language_model(args.path, args.data)
    if args.search:
        make_folder(args.out)
    model.to(device(args))

    def read(split):
        with progress_bar(split, len(text(task, split))) as bar:
            return predict_text(model, task, split, args.segment_length, bar.update)

    text(task, args.subset)  # a split that is missing, before anything takes time
    if args.search:
        rows = search(args, read("valid"))
        grid_search.save(rows, args.out, "theta", "weight", "continuous cache pointer, valid, at the best window")
        winner = grid_search.best(rows)
        args.weight, args.theta, args.window = winner["weight"], winner["theta"], winner["window"]
        print(f"valid:\n{grid_search.table(rows)}\n\nTable and heat map: {args.out}/search.csv, search.png\n")

    predictions = read(args.subset)
    static = score(predictions.log_probs)
    with progress_bar("cache", static.tokens) as bar:
        cached = cache_pointer(predictions, args.weight, args.theta, args.window, bar.update)
    print(f"{args.subset}: {static.tokens:,} tokens, static perplexity {static.perplexity:.3f}")
    print(
        f"{args.subset}: {cached.tokens:,} tokens, perplexity with cache {cached.perplexity:.3f} "
        f"(lambda {args.weight:g}, theta {args.theta:g}, window {args.window:,})"
    )


if __name__ == "__main__":
    start.run(main)
