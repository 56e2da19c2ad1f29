#!/usr/bin/env python3
"""One table of several trainings, out of their own logs and score files, as Markdown and CSV.

    python scripts/collect_results.py checkpoints/wmt14_en_de.* --csv results.csv --plot results.png
    python scripts/collect_results.py checkpoints/ptb.* --baseline softmax
    python scripts/collect_results.py checkpoints/ptb.* --correlate rank "test ppl" --scatter correlation.png

Reads what examples/*/train.sh and evaluate.sh leave in each folder: train.log, score.json, test-perplexity.txt,
valid.txt, test.txt, dynamic_evaluation.txt, cache_pointer.txt; and rank.json, predictions.json and similarity.json of
scripts/analyze.py. A value without a file is "not run", one that its file does not give is "unreadable".

--groups puts trainings whose commands differ in --seed and --save alone into one line: mean ± standard deviation.
--baseline LAYER adds how likely a difference as large is where there is none: p of Student's and of Welch's t-test.
--correlate prints Pearson's r of two columns and draws one over the other.

    epochs       those that were trained whole
    ended        whether fairseq-train came to its end (or may still be at work)
    train ppl    in training, with dropout, in the epoch of the best validation; where epochs are shards of the text,
                 of the last 4,000 updates
    valid ppl    that of valid.txt; where there is none, the lowest of the log
    tokens/s     median of the log's lines in training, target tokens
    s an epoch   median, without validation
    wall time    of training and validation, as fairseq counts it, resumed trainings added up
    commit       of this repository when training began, "+" where files had been changed
"""

import argparse
import sys
from pathlib import Path

import start

from mixtape_plugin.analysis.files import write_csv, write_whole
from mixtape_plugin.analysis.results import (
    NOT_RUN,
    collect,
    csv_columns,
    markdown,
    validation_curve,
)
from mixtape_plugin.analysis.statistics import (
    compare,
    correlate,
    find_baseline,
    groups,
    groups_markdown,
    numbers,
)
from mixtape_plugin.errors import UserError

PICTURES = (".png", ".pdf", ".svg")


def label(row):
    seed = f", seed {row['seed']}" if row["seed"] else ""
    return f"{row['layer']}{seed}" if row["layer"] else row["training"]


def draw(path, rows, curves):
    """Validation perplexity against updates, a line for each training."""
    import matplotlib  # here, because only --plot needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    labels = [label(row) for row in rows]
    for row, name, curve in zip(rows, labels, curves):
        if curve:
            name = name if labels.count(name) == 1 else f"{name} ({row['folder']})"
            marker = "o" if len(curve) < 30 else None
            axes.plot(list(curve), list(curve.values()), marker=marker, markersize=3, label=name)
    axes.set(yscale="log", xlabel="updates", ylabel="validation perplexity")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    write_whole(path, lambda part: figure.savefig(part, dpi=150))
    plt.close(figure)


def draw_correlation(path, found, x, y):
    """One column over another, a colour for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.5), constrained_layout=True)
    for layer in dict.fromkeys(row["layer"] for row in found.rows):
        rows = [row for row in found.rows if row["layer"] == layer]
        axes.scatter(numbers(rows, x), numbers(rows, y), label=layer or "unknown")
    axes.set(xlabel=x, ylabel=y, title=f"Pearson r = {found.r:.2f}, p = {found.p:.2g}, n = {len(found.rows)}")
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda part: figure.savefig(part, dpi=150))
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders that train.sh wrote")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table here")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the numbers, commands and signatures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw validation perplexity against updates")
    parser.add_argument("--groups", action="store_true", help="also mean ± standard deviation over seeds")
    parser.add_argument("--baseline", metavar="LAYER", help="also t-tests against this group's (implies --groups)")
    parser.add_argument("--groups-csv", type=Path, metavar="FILE", help="also write that table here (implies --groups)")
    parser.add_argument("--correlate", nargs=2, metavar="COLUMN", help="also Pearson's r of these two columns")
    parser.add_argument("--range", nargs=2, type=float, metavar=("LO", "HI"), help="of the second column, what counts")
    parser.add_argument("--scatter", type=Path, metavar="PNG", help="draw it here (default: correlation.png)")
    args = parser.parse_args(argv)
    for option, path in (("--plot", args.plot), ("--scatter", args.scatter)):
        if path and path.suffix.lower() not in PICTURES:
            raise UserError(f"{option} {path} is not allowed: a name that ends in .png, .pdf or .svg")
    for option, value in (("--range", args.range), ("--scatter", args.scatter)):
        if value and not args.correlate:
            raise UserError(f"{option} {value} needs --correlate: name two columns")

    rows = []
    for folder in args.folders:
        row, damaged = collect(folder)
        rows.append(row)
        for sentence in damaged:
            print(f"collect_results.py: {sentence}", file=sys.stderr)
    text, lines, correlation, scatter = markdown(rows), [], None, None
    if args.groups or args.baseline or args.groups_csv:
        found = groups(rows)
        baseline = find_baseline(found, args.baseline) if args.baseline else None
        lines, tests = compare(found, baseline)
        text += "\n" + groups_markdown(lines, tests, baseline)
    if args.correlate:
        correlation = correlate(rows, *args.correlate, args.range)
        scatter = args.scatter or Path("correlation.png")
        text += (
            f"\n{args.correlate[1]} over {args.correlate[0]}: Pearson r = {correlation.r:.3f}, "
            f"p = {correlation.p:.3g}, n = {len(correlation.rows)} ({scatter})\n"
        )
    print(text, end="")
    for option, path, write in (
        ("--markdown", args.markdown, lambda path: write_whole(path, lambda p: p.write_text(text, encoding="utf-8"))),
        ("--csv", args.csv, lambda path: save_csv(path, rows)),
        ("--groups-csv", args.groups_csv, lambda path: save_groups(path, lines)),
        ("--plot", args.plot, lambda path: save_plot(path, rows)),
        ("--scatter", scatter, lambda path: draw_correlation(path, correlation, *args.correlate)),
    ):
        if path:
            try:
                write(path)
            except OSError as error:
                raise UserError(f"{option} {path} cannot be written: {error.strerror}") from None


def save_csv(path, rows):
    columns = csv_columns(rows)
    values = ({column: NOT_RUN if row.get(column) is None else row[column] for column in columns} for row in rows)
    write_csv(path, columns, values)


def save_groups(path, lines):
    columns = list(dict.fromkeys(name for line in lines for name in line))
    write_csv(path, columns, ({name: line.get(name) for name in columns} for line in lines))  # None is an empty cell


def save_plot(path, rows):
    curves = [validation_curve(row["folder"]) for row in rows]
    if not any(curves):
        raise UserError(f"--plot {path} has nothing to show: none of the logs has a validation")
    draw(path, rows, curves)


if __name__ == "__main__":
    start.run(main)
