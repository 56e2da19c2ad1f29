#!/usr/bin/env python3
"""Time and peak memory of a training step (loss, and its gradients) of each output layer, against plain softmax.

    python scripts/benchmark_output_layers.py --shapes ptb --threads 2 --memory-budget 4 --out ptb.csv
    python scripts/benchmark_output_layers.py --device cuda --dtype bfloat16 --tokens 4096
    python scripts/benchmark_output_layers.py --sweep --threads 2 --rounds 3 --out sweep.csv --plot sweep.png

Every layer runs eager and fused, and softmax also as others have it, where that is installed: torch 2.13's
linear_cross_entropy and, on a GPU, Liger-Kernel and cut-cross-entropy (25.1.1 has no bias, and goes without). They take
turns, round by round after a warm-up, so that a busy machine is busy for all of them: the ratios of their medians hold
better than the times. Softmax and the maps of its scores have no projection: their features are E wide, those of the
mixtures D.

Ratios are to the plain softmax, F.cross_entropy(F.linear(h, W, b), y), of the time of a token. FLOPs are those of the
matrix products, "matmul" is their speed as a share of that of one large matrix product in the same rounds, and
"paper" is the time of the output layer in tables 3 to 6 of the Mixtape paper, at one batch size or at one memory
budget. Memory is the peak beyond that of a step on 16 tokens: without weights and their gradients, on a CPU in a
fresh process for each layer. A layer that would not fit in memory is skipped, and says so.

--memory-budget adds rows at the largest number of tokens whose step fits, weights and gradients included. Since memory
is about affine in tokens, two measured steps give an estimate, which is measured and corrected to within 2%. The fused
losses hold so little that most of them end at --largest-batch. An eager loss of more than 2^28 scores holds them in
chunks, here as in a training.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from typing import Sequence

import start
from tqdm import tqdm

from mixtape_plugin.benchmarks.command_line import (
    add_common_options,
    at_least,
    check_common_options,
    markdown_table,
    milliseconds,
    number,
    provenance,
    settings_of_memory,
    write_outputs,
)
from mixtape_plugin.benchmarks.measuring import Setting
from mixtape_plugin.benchmarks.output_layer_benchmark import COLUMNS, TINY, benchmark_output_layers, sweep, turns
from mixtape_plugin.benchmarks.workloads import (
    BASELINE,
    PEERS,
    SHAPES,
    SWEEP_COMPONENTS,
    SWEEP_SHAPE,
    SWEEP_VOCAB_SIZES,
    Shape,
    build_layer,
    check_layer,
    installed_peers,
    layer_options,
    split_layer,
    variants,
    without_values,
)
from mixtape_plugin.drawing import pyplot, save
from mixtape_plugin.errors import UserError
from mixtape_plugin.output_layers import OUTPUT_IMPLS


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or V:E:D:K:r:N."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        v, e, d, k, r, n = text.split(":")
        shape = Shape(text, int(v), int(e), int(d), int(k), float(r), int(n))
    except ValueError:
        raise UserError(
            f"--shapes {text} is none of {', '.join(SHAPES)}, and no V:E:D:K:r:N such as 1000:16:24:3:0.1:64"
        ) from None
    if shape.vocab_size < 2 or min(shape.embed_dim, shape.feature_dim) < 1:  # of one token there is nothing to predict
        raise UserError(f"--shapes {text} has a V, E or D that is not allowed: V is at least 2, E and D at least 1")
    return shape


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}, or V:E:D:K:r:N (vocabulary, embedding, features, components of MoS and MoC, "
        "share of frequent tokens, tokens a step); default: ptb one-billion en-de",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=list(layer_options()),
        metavar="LAYER",
        help=f"of {', '.join(layer_options())}, or a mixture with a K of its own such as mos-3; softmax always runs; "
        "default: all",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens a step, instead of the shapes' own")
    parser.add_argument("--noise", action="store_true", help="with the papers' gate noise and dropout (default: none)")
    parser.add_argument(
        "--prices",
        action="store_true",
        help="also, in the same rounds, what the papers' noise and dropout, and label smoothing .1, cost",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help=f"at one small shape, V of {', '.join(map(str, SWEEP_VOCAB_SIZES))} with one K for all, and "
        f"K of {', '.join(map(str, SWEEP_COMPONENTS))}",
    )
    parser.add_argument("--plot", metavar="FILE", help="with --sweep, time and memory: .png, .pdf or .svg")
    add_common_options(parser, [*OUTPUT_IMPLS, *PEERS], "eager, fused, and others where installed", "0")
    parser.set_defaults(label_smoothing=0.0)
    args = parser.parse_args(argv)

    check_common_options(args, tokens=TINY + 1)
    layers = [check_layer(text) for text in args.layers]
    known = [layer for kind in layer_options() for layer in layers if split_layer(layer)[0] == kind]
    args.layers = list(dict.fromkeys([BASELINE.layer, *known]))
    shapes = [parse_shape(text) for text in args.shapes or ()]
    if args.sweep:
        if len(shapes) > 1 or args.memory_budget is not None or args.prices:
            raise UserError("--sweep goes with at most one of --shapes, and with neither --memory-budget nor --prices")
        if any(split_layer(layer)[1] for layer in layers):
            raise UserError("--sweep sets K itself: give --layers without it")
        shapes = shapes or [SWEEP_SHAPE]
    elif args.prices and (args.noise or args.label_smoothing or args.memory_budget is not None):
        raise UserError("--prices is what --noise and --label-smoothing cost: give it without them and --memory-budget")
    elif args.plot:
        raise UserError(f"--plot {args.plot} draws a sweep: add --sweep")
    shapes = shapes or [SHAPES[name] for name in ("ptb", "one-billion", "en-de")]
    args.shapes = [shape._replace(tokens=args.tokens or shape.tokens) for shape in shapes]
    for shape in args.shapes:
        if shape.tokens <= TINY:
            raise UserError(f"--shapes {shape.shape} has too few tokens: at least {TINY + 1}")
        for variant in variants(args.layers, ["eager"]):
            try:
                with without_values():  # of any size
                    build_layer(variant, shape._replace(embed_dim=1, feature_dim=1))
            except UserError as error:  # of K or r
                raise UserError(f"--shapes {shape.shape}: {error}") from None
    if args.device == "cpu" and args.dtype == "float16":
        raise UserError("--dtype float16 is not allowed with --device cpu: bfloat16, float32 or float64")
    peers = installed_peers(args.device)
    args.impls = args.impls or ["eager", "fused", *peers]
    for impl in args.impls:
        if impl in PEERS and impl not in peers:
            raise UserError(
                f"--impls {impl} is not allowed here: it is not installed, or not for --device {args.device}"
            )
    return args


def cells(row: dict) -> list:
    shape = row["shape"] if not row["sweep"] else "{sweep}={sweep_value}".format(**row)
    cells = [shape, row["layer"], row["impl"], number(row["memory_budget_gb"], "g"), at_least(row, "tokens")]
    cells += [milliseconds(row), number(row["us_per_token"], ",.1f")]
    cells += [number(row[name], ".2f") for name in ("time_ratio", "flop_ratio", "paper_ratio")]
    cells += [number(row["matmul_share"], ".0%")]
    cells += [number(row[name], ".2f") for name in ("noise_ratio", "smoothing_ratio")]
    cells += [number(row["peak_memory_mb"], ",.0f")]
    return [*cells, number(row["parameters"], ",")]


def markdown(rows: Sequence[dict], facts: dict) -> str:
    """The rows as a table."""
    names = ["shape", "layer", "impl", "budget, GB", "N", "ms, median (min–max)", "µs a token", "time ratio"]
    names += ["FLOP ratio", "paper", "matmul"]
    names += ["with noise", "with smoothing", "memory, MB", "parameters"]
    return markdown_table(facts, names, 3, map(cells, rows))


def draw(path: str, rows: Sequence[dict], facts: dict) -> None:
    """Time of a token and memory against V and against K: a colour a layer, a line style an implementation."""
    plt = pyplot()
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys(split_layer(row["layer"])[0] for row in rows))
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    palette = ("black", "tab:red", "tab:green", "tab:blue", "tab:purple", "tab:orange", "tab:brown", "tab:pink")
    colors = dict(zip(layer_options(), cycle(palette)))
    styles = dict(zip(impls, ("--", "-", ":", "-.", (0, (1, 3)), (0, (5, 5)))))
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharey="row", constrained_layout=True)
    for column, swept, label in ((0, "V", "vocabulary size V"), (1, "K", "components K of the mixtures")):
        of_sweep = [row for row in rows if row["sweep"] == swept and not row["skipped"]]
        other, fixed = {"V": ("K", "num_components"), "K": ("V", "vocab_size")}[swept]
        axes[0][column].set_title(f"{other} = {max([row[fixed] for row in of_sweep], default=0):,}", fontsize=10)
        ticks = sorted({row["sweep_value"] for row in of_sweep})
        for line, name, unit in ((0, "us_per_token", "µs a token"), (1, "peak_memory_mb", "memory, MB")):
            axis = axes[line][column]
            for kind in kinds:
                for impl in impls:
                    points = [
                        (row["sweep_value"], max(row[name], 1 if name == "peak_memory_mb" else 0))
                        for row in of_sweep
                        if (split_layer(row["layer"])[0], row["impl"]) == (kind, impl)
                    ]
                    if points:
                        axis.plot(*zip(*points), color=colors[kind], linestyle=styles[impl], marker=".")
            axis.set(xscale="log", yscale="log", xlabel=label)
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.set_ylabel(unit if column == 0 else "")
    handles = [Line2D([], [], color=colors[kind], label=kind) for kind in kinds]
    handles += [Line2D([], [], color="gray", linestyle=styles[impl], label=impl) for impl in impls]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        f"{facts['machine']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['torch']}", fontsize=8
    )
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    facts = provenance(args, dtype=args.dtype, noise=args.noise, label_smoothing=args.label_smoothing)
    setting = Setting(args.device, args.dtype, args.threads, args.noise, args.label_smoothing)
    limit, budgets = settings_of_memory(args)
    chosen = variants(args.layers, args.impls)
    points = len(SWEEP_VOCAB_SIZES) + len(SWEEP_COMPONENTS) if args.sweep else len(args.shapes) * len(budgets)
    rows = []
    with tqdm(total=points * turns(chosen, args.rounds, args.prices), unit="turn") as bar:
        for shape in args.shapes:
            bar.set_description(shape.shape)
            if args.sweep:
                rows += sweep(shape, args.layers, args.impls, setting, args.rounds, limit, bar.update)
            else:
                for budget in budgets:
                    rows += benchmark_output_layers(
                        shape, chosen, setting, args.rounds, limit, budget, args.prices, bar.update
                    )
    print(markdown(rows, facts), end="")
    write_outputs(args, COLUMNS, rows, facts, draw)


if __name__ == "__main__":
    start.run(main)
