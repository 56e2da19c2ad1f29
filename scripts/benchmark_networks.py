#!/usr/bin/env python3
"""Training speed of a whole language model (tokens a second, time and peak memory of a step) with each output layer.

    python scripts/benchmark_networks.py --shapes ptb --threads 2 --out ptb.csv --plot ptb.png
    python scripts/benchmark_networks.py --shapes ptb one-billion --device cuda --sizes own

A step is what fairseq-train does with a segment: embedding, LSTM layers with weight drop, dropouts, output layer,
loss, backward, clipping, SGD. The networks take turns, a round after a warm-up, so that a busy machine is busy for all
of them: the ratios of their medians hold better than the times. The output layer's part, its loss and gradients, is
timed alone in the same rounds. Ratios are to softmax; "paper" is "all layers" at the same batch size in tables 3 and 4
of the Mixtape paper, whose batch is 48 (Penn Treebank) and 20 (One Billion Word) and whose softmax and MoS have sizes
that it does not print. Memory is the peak of a training: weights, gradients, and all that a step holds; on a CPU in a
fresh process for each network. A network that would not fit in memory is skipped, and says so.
"""

import argparse
import logging
import os
import re
import sys
from pathlib import Path

import torch
from tqdm import tqdm

if __name__ == "__main__":  # before fairseq is imported, which sets a level that floods the terminal
    logging.basicConfig(level=logging.WARNING)
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmark_output_layers import provenance  # noqa: E402

from mixtape_plugin.analysis.benchmark import Setting  # noqa: E402
from mixtape_plugin.analysis.files import write_csv, write_whole  # noqa: E402
from mixtape_plugin.analysis.network_benchmark import (  # noqa: E402
    COLUMNS,
    SHAPES,
    SIZES,
    TextShape,
    benchmark,
)
from mixtape_plugin.errors import UserError  # noqa: E402
from mixtape_plugin.models.awd_lstm_lm import parse_hidden_sizes  # noqa: E402

LAYER = re.compile(r"softmax|mixtape|mixtape-no-sharing|mo[cs]-[1-9][0-9]*")


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


def parse(argv):
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
        help="of moc-K, mos-K (K components), mixtape, mixtape-no-sharing; softmax always runs; default: the paper's",
    )
    parser.add_argument(
        "--sizes",
        choices=SIZES,
        default="same",
        help="same: embedding and LSTM of MoS's network for all (softmax: a last layer as wide as the embedding); "
        "own: each layer's own architecture, of about equal parameters; default: %(default)s",
    )
    parser.add_argument("--batch-size", type=int, metavar="B", help="columns; default: the MoS paper's")
    parser.add_argument("--segment-length", type=int, metavar="T", help="time steps; default: the MoS paper's")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="after the warm-up; default: %(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; default: what torch would use")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="skip what needs more; default: what is free")
    parser.add_argument("--out", metavar="FILE", help="also write the table as CSV")
    parser.add_argument("--plot", metavar="FILE", help="also draw the steps as bars: .png, .pdf or .svg")
    args = parser.parse_args(argv)

    args.threads = torch.get_num_threads() if args.threads is None else args.threads
    for name, least in (("batch_size", 1), ("segment_length", 1), ("rounds", 1), ("threads", 1), ("memory_limit", 0)):
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UserError(f"--{name.replace('_', '-')} {value} is not allowed: at least {least}")
    for layer in args.layers or ():
        if not LAYER.fullmatch(layer):
            raise UserError(
                f"--layers {layer} is not allowed: softmax, moc-K, mos-K (such as mos-15), mixtape, mixtape-no-sharing"
            )
    args.shapes = [
        shape._replace(
            layers=tuple(dict.fromkeys(["softmax", *(args.layers or shape.layers)])),
            batch_size=args.batch_size or shape.batch_size,
            segment_length=args.segment_length or shape.segment_length,
        )
        for shape in map(parse_shape, args.shapes)
    ]
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda is not allowed here: torch finds no GPU")
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
            raise UserError(f"{option} {path} cannot be written: its folder is missing or read-only")
    if args.plot and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot {args.plot} is not allowed: a name that ends in .png, .pdf or .svg")
    return args


def markdown(rows, facts) -> str:
    """The rows as a table."""
    lines = [
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()),
        "",
        "| shape | layer | E / LSTM | B×T | parameters | ms a step, median (min–max) | tokens/s | ratio | paper "
        "| output layer, ms | its share | paper | memory, MB |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]

    def number(value, form):
        return "–" if value is None else format(value, form)

    for row in rows:
        cells = [row["shape"], row["layer"], "{embed_dim} / {hidden_sizes}".format(**row)]
        cells += ["{batch_size}×{segment_length}".format(**row), number(row["parameters"], ",")]
        cells += [row["skipped"] or "{ms_median:.1f} ({ms_min:.1f}–{ms_max:.1f})".format(**row)]
        cells += [number(row["tokens_per_second"], ",.0f")]
        cells += [number(row[name], ".2f") for name in ("time_ratio", "paper_ratio")]
        cells += [number(row["output_ms_median"], ".1f")]
        cells += [number(row[name], ".0%") for name in ("output_share", "paper_output_share")]
        cells += [number(row["peak_memory_mb"], ",.0f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_rows(path: str, rows, facts) -> None:
    """One line for each row, with the facts of the run."""
    write_csv(path, [*COLUMNS, *facts], ({**row, **facts} for row in rows))


def draw(path: str, rows, facts) -> None:
    """A bar for each network that ran, its output layer's part apart, with the ratio to softmax; a drawing a shape."""
    import matplotlib  # here, because the processes that memory is measured in import this file

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(6.5 * len(shapes), 4), squeeze=False, constrained_layout=True)
    for axis, shape in zip(axes[0], shapes):
        ran = [row for row in rows if row["shape"] == shape and not row["skipped"]]
        places = range(len(ran))
        output = [row["output_ms_median"] for row in ran]
        rest = [max(row["ms_median"] - row["output_ms_median"], 0) for row in ran]
        axis.barh(places, rest, color="tab:gray", label="the rest of the network")
        axis.barh(places, output, left=rest, color="tab:orange", label="output layer")
        for place, row in zip(places, ran):
            paper = "" if row["paper_ratio"] is None else f" (paper {row['paper_ratio']:.2f})"
            text = "" if row["time_ratio"] is None else f" {row['time_ratio']:.2f}{paper}"
            axis.text(row["ms_median"], place, text, va="center")
        axis.set(xlabel="ms a training step", yticks=places, yticklabels=[row["layer"] for row in ran])
        axis.set_title(f"{shape}: ratio to softmax", fontsize=10)
        axis.set_xlim(0, 1.45 * max([row["ms_median"] for row in ran], default=1))
        axis.invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"{facts['machine']}, {facts['threads']} threads, torch {facts['torch']}", fontsize=8)
    write_whole(path, lambda part: figure.savefig(part, dpi=150))
    plt.close(figure)


def main(argv=None):
    try:
        args = parse(argv)
    except UserError as error:
        sys.exit(f"benchmark_networks.py: {error}")
    # for the processes that memory is measured in
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    facts = provenance(argparse.Namespace(**vars(args), dtype="float32", noise=True))
    facts["sizes"] = args.sizes
    setting = Setting(args.device, "float32", args.threads, noise=True)
    limit = None if args.memory_limit is None else args.memory_limit * 1e9
    rows = []
    total = sum(len(shape.layers) for shape in args.shapes) * (2 * args.rounds + 3)
    with tqdm(total=total, unit="turn") as bar:
        for shape in args.shapes:
            bar.set_description(shape.shape)
            rows += benchmark(shape, shape.layers, setting, args.rounds, args.sizes, limit, bar.update)
    print(markdown(rows, facts))
    for option, path, write in (("--out", args.out, write_rows), ("--plot", args.plot, draw)):
        if path:
            try:
                write(path, rows, facts)
            except OSError as error:
                sys.exit(f"benchmark_networks.py: {option} {path} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
