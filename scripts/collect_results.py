#!/usr/bin/env python3
"""One table of several trainings, out of their own logs and score files, as Markdown and CSV.

    python scripts/collect_results.py checkpoints/wmt14_en_de.* --csv results.csv --plot results.png

Reads what examples/*/train.sh and evaluate.sh leave in each folder: train.log, score.json, test-perplexity.txt,
valid.txt, test.txt, dynamic_evaluation.txt, cache_pointer.txt. A value without a file is "not run", one that its file
does not give is "unreadable".

    epochs       those that were trained whole
    ended        whether fairseq-train came to its end (or may still be at work)
    valid ppl    that of valid.txt; where there is none, the lowest of the log
    tokens/s     median of the log's lines in training, target tokens
    wall time    of training and validation, as fairseq counts it, resumed trainings added up
    commit       of this repository when training began, "+" where files had been changed
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mixtape_plugin.analysis.files import write_csv, write_whole  # noqa: E402
from mixtape_plugin.analysis.results import (  # noqa: E402
    NOT_RUN,
    collect,
    csv_columns,
    markdown,
    validation_curve,
)
from mixtape_plugin.errors import UserError, print_user_errors  # noqa: E402


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders that train.sh wrote")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table here")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the numbers, commands and signatures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw validation perplexity against updates")
    args = parser.parse_args(argv)
    if args.plot and args.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--plot {args.plot} is not allowed: a name that ends in .png, .pdf or .svg")

    rows = []
    for folder in args.folders:
        row, damaged = collect(folder)
        rows.append(row)
        for sentence in damaged:
            print(f"collect_results.py: {sentence}", file=sys.stderr)
    table = markdown(rows)
    print(table, end="")
    for option, path, write in (
        ("--markdown", args.markdown, lambda path: write_whole(path, lambda p: p.write_text(table, encoding="utf-8"))),
        ("--csv", args.csv, lambda path: save_csv(path, rows)),
        ("--plot", args.plot, lambda path: save_plot(path, rows)),
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


def save_plot(path, rows):
    curves = [validation_curve(row["folder"]) for row in rows]
    if not any(curves):
        raise UserError(f"--plot {path} has nothing to show: none of the logs has a validation")
    draw(path, rows, curves)


if __name__ == "__main__":
    print_user_errors()
    main()
