#!/usr/bin/env python3
"""Training speed of a whole network (tokens a second, time and peak memory of a step) with each output layer.

    python scripts/benchmark_networks.py --shapes ptb --threads 2 --memory-budget 4 --out ptb.csv --plot ptb.png
    python scripts/benchmark_networks.py --shapes ptb one-billion en-de --device cuda --sizes own

A step is what fairseq-train does with a segment of text: embedding, LSTM layers with weight drop, dropouts, output
layer, loss, backward, clipping, SGD; or with sentences of 32 tokens on either side: Transformer, output layer, label
smoothing, backward, Adam. Every layer runs eager and fused, both on the same weights, and softmax plain as well, with
F.cross_entropy(F.linear(h, W, b), y) for its loss. The networks take turns, round by round after a warm-up, so that a
busy machine is busy for all of them: the ratios of their medians hold better than the times. The output layer's part,
its loss and gradients, is timed alone in the same rounds.

Ratios are to the plain softmax, of the time of an instance, a column or a sentence; "paper" is "all layers" in tables 3
to 6 of the Mixtape paper, at the same batch size or at the same memory budget as in the row, and its share of "out
layer". Its batch is 48 (Penn Treebank), 20 (One Billion Word) and 256 (translation: tokens, as its times suggest), and
its softmax and MoS have sizes that it does not print. "MoS paper" is its table 13, "bs" or "best-1", not "best-3",
which is of three GPUs. Memory is the peak of a training: weights, gradients, optimizer, and all that a step holds; on a
CPU in a fresh process for each network. A network that would not fit in memory is skipped, and says so.

--memory-budget adds rows at the largest batch whose training fits. Since memory is about affine in the batch, two
measured steps give an estimate, which is measured and corrected to within 2% (or one column). "≥": even --largest-batch
fits.
"""

from __future__ import annotations

import argparse
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
from mixtape_plugin.benchmarks.network_benchmark import COLUMNS, benchmark_networks
from mixtape_plugin.benchmarks.network_workloads import SHAPES, SIZES, TextShape
from mixtape_plugin.benchmarks.workloads import BASELINE, check_layer, layer_options, variants
from mixtape_plugin.drawing import pyplot, save
from mixtape_plugin.errors import UserError
from mixtape_plugin.models.awd_lstm_lm import parse_hidden_sizes
from mixtape_plugin.output_layers import OUTPUT_IMPLS


def parse_shape(text: str) -> TextShape:
    """A name of SHAPES, or V:E:H,H,H with the batch, segments and dropouts of Penn Treebank."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        v, e, hidden_sizes = text.split(":")
        parse_hidden_sizes(hidden_sizes)
        shape = SHAPES["ptb"]._replace(shape=text, vocab_size=int(v), embed_dim=int(e), hidden_sizes=hidden_sizes)
    except ValueError:  # UserError is one
        raise UserError(
            f"--shapes {text} is none of {', '.join(SHAPES)}, and no V:E:H,H,… such as 1000:16:32,32,24"
        ) from None
    if shape.vocab_size < 10 or shape.embed_dim < 1:
        raise UserError(f"--shapes {text} has a V or E that is not allowed: V at least 10, E at least 1")
    return shape


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["ptb"],
        metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}, or V:E:H,H,… (vocabulary, embedding, units of each LSTM layer); "
        "default: %(default)s",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        metavar="LAYER",
        help=f"of {', '.join(layer_options())}, mixtures with K components after it, such as mos-15 (mixtape has 4 "
        "anyway); softmax always runs; default: the paper's",
    )
    parser.add_argument(
        "--sizes",
        choices=SIZES,
        default="same",
        help="same: embedding and LSTM of MoS's network for all (softmax: a last layer as wide as the embedding); "
        "own: each layer's own architecture, of about equal parameters; default: %(default)s",
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="columns or sentences; default: the shape's")
    parser.add_argument("--segment-length", type=int, metavar="T", help="time steps; default: the shape's")
    parser.add_argument("--plot", metavar="FILE", help="also draw the steps as bars: .png, .pdf or .svg")
    add_common_options(parser, OUTPUT_IMPLS, "eager, fused", "that of the shape's recipe")
    args = parser.parse_args(argv)

    check_common_options(args, batch_size=1, segment_length=1)
    args.impls = args.impls or ["eager", "fused"]
    for layer in args.layers or ():
        check_layer(layer, needs_components=True)
    args.shapes = [
        shape._replace(
            layers=tuple(dict.fromkeys([BASELINE.layer, *(args.layers or shape.layers)])),
            batch_size=args.batch_size or shape.batch_size,
            segment_length=args.segment_length or shape.segment_length,
            label_smoothing=shape.label_smoothing if args.label_smoothing is None else args.label_smoothing,
        )
        for shape in map(parse_shape, args.shapes)
    ]
    return args


def cells(row: dict) -> list:
    cells = [row["shape"], row["layer"], row["impl"], "{embed_dim} / {hidden_sizes}".format(**row)]
    cells += [number(row["parameters"], ","), number(row["memory_budget_gb"], "g")]
    cells += [f"{at_least(row, 'batch_size')}×{row['segment_length']}", milliseconds(row)]
    cells += [number(row["tokens_per_second"], ",.0f")]
    cells += [number(row[name], ".2f") for name in ("time_ratio", "paper_ratio", "mos_paper_ratio")]
    cells += [number(row["output_ms_median"], ".1f")]
    cells += [number(row[name], ".2f") for name in ("output_time_ratio", "paper_output_ratio")]
    cells += [number(row[name], ".0%") for name in ("output_share", "paper_output_share")]
    return [*cells, number(row["peak_memory_mb"], ",.0f")]


def markdown(rows: Sequence[dict], facts: dict) -> str:
    """The rows as a table."""
    names = ["shape", "layer", "impl", "E / hidden", "parameters", "budget, GB", "B×T", "ms a step, median (min–max)"]
    names += ["tokens/s", "ratio", "paper", "MoS paper", "output layer, ms", "ratio", "paper", "its share", "paper"]
    names += ["memory, MB"]
    return markdown_table(facts, names, 4, map(cells, rows))


def draw(path: str, rows: Sequence[dict], facts: dict) -> None:
    """A bar for each network that ran, its output layer's part apart, with the ratio to softmax; a drawing for each
    shape at one batch size, and one at the memory budget."""
    plt = pyplot()

    panels = list(dict.fromkeys((row["shape"], row["memory_budget_gb"]) for row in rows))
    most = max(sum((row["shape"], row["memory_budget_gb"]) == panel for row in rows) for panel in panels)
    size = (6.5 * len(panels), 1.5 + 0.35 * most)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, constrained_layout=True)
    for axis, (shape, budget) in zip(axes[0], panels):
        ran = [row for row in rows if (row["shape"], row["memory_budget_gb"]) == (shape, budget) and not row["skipped"]]
        places = range(len(ran))
        output = [row["output_ms_median"] / row["batch_size"] for row in ran]
        rest = [max(row["ms_per_instance"] - part, 0) for row, part in zip(ran, output)]
        axis.barh(places, rest, color="tab:gray", label="the rest of the network")
        axis.barh(places, output, left=rest, color="tab:orange", label="output layer")
        for place, row in zip(places, ran):
            paper = "" if row["paper_ratio"] is None else f" (paper {row['paper_ratio']:.2f})"
            text = "" if row["time_ratio"] is None else f" {row['time_ratio']:.2f}{paper}"
            axis.text(row["ms_per_instance"], place, text, va="center")
        names = ["{layer}, {impl}, B={batch_size}".format(**row) for row in ran]
        axis.set(xlabel="ms an instance (column or sentence) of a training step", yticks=places, yticklabels=names)
        setting = "one batch size" if budget is None else f"{budget:g} GB"
        axis.set_title(f"{shape}, {setting}: ratio to the plain softmax", fontsize=10)
        axis.set_xlim(0, 1.6 * max([row["ms_per_instance"] for row in ran], default=1))
        axis.invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{facts['machine']}, {facts['threads']} threads, torch {facts['torch']}", fontsize=8)
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    # label smoothing is a column: it differs between shapes
    facts = {**provenance(args, dtype="float32", noise=True), "sizes": args.sizes}
    setting = Setting(args.device, "float32", args.threads, noise=True)
    limit, budgets = settings_of_memory(args)
    chosen = {shape: variants(shape.layers, args.impls) for shape in args.shapes}
    rows = []
    total = len(budgets) * sum(map(len, chosen.values())) * (2 * args.rounds + 3)
    with tqdm(total=total, unit="turn") as bar:
        for shape, layers in chosen.items():
            bar.set_description(shape.shape)
            for budget in budgets:
                rows += benchmark_networks(shape, layers, setting, args.rounds, args.sizes, limit, budget, bar.update)
    print(markdown(rows, facts), end="")
    write_outputs(args, COLUMNS, rows, facts, draw)


if __name__ == "__main__":
    start.run(main)
