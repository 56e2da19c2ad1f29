#!/usr/bin/env python3
"""One table of several trainings, out of their own logs and score files, as Markdown and CSV.

    python scripts/collect_results.py checkpoints/wmt14_en_de.* --csv results.csv --plot results.png
    python scripts/collect_results.py examples/ptb/results/runs.csv checkpoints/ptb.* --groups
    python scripts/collect_results.py --page README.md docs/results*.md
    python scripts/collect_results.py --overview docs/overview.csv --differences overview.png
    python scripts/collect_results.py checkpoints/ptb.* --baseline softmax
    python scripts/collect_results.py checkpoints/ptb.* --correlate rank "test ppl" --scatter correlation.png

Reads what examples/*/train.sh and evaluate.sh leave in each folder: train.log, score.json, valid-score.json,
test-perplexity.txt, lenpen.json, valid.txt, test.txt, dynamic_evaluation.txt, cache_pointer.txt; and rank.json,
predictions.json and similarity.json of scripts/analyze.py. A value without a file is "not run", one that its file does
not give is "unreadable".

--groups puts trainings whose commands differ in --seed and --save alone into one line: mean ± standard deviation.
--baseline LAYER adds how far each score is from that layer's, with 95% intervals (perplexities in percent), and the
p-values of Student's and of Welch's t-test ("p Student" and "p Welch" of --columns); --differences draws these
intervals, a panel for each score of --columns.
--mean NAME COLUMN… adds a column, of each training the mean of two or more, such as BLEU of two texts.
--correlate prints Pearson's r of two columns and draws one over the other.
--name GROUP NAME calls a line of these, and of --plot, by a better name than its flags.
--overview FILE puts several tables of --groups-csv into one, a line each: how far layers are in the test perplexity (or
the score that --columns names) from a baseline. Of the CSV file's columns trainings is a line's name, groups such a
table, from the present folder, and each further one, the baseline first, a layer with its group's name there; an empty
cell was not run, and – stays as it is. --where and --without choose lines by their names. --differences draws it.
--speeds TEXT, beside --plot, takes each network's speed, for its hours, from trainings whose command has TEXT: those
that ran in turns, so that hours compare. --where and --without leave these in.
--draw X,… Y PNG draws a line for each layer: means over trainings with the same X, and their standard deviations; a
panel for each X.
A column may be a flag of the trainings' commands, too: embed-dim is what they give --embed-dim, "–" where they do not.

A CSV file that --csv wrote stands for the folders of its rows. --page makes the tables of Markdown pages anew: each
block <!-- collect_results.py ARGUMENTS --> … <!-- end --> gets what these arguments print, run in the present folder,
those with --overview after all others.

    epochs       those that were trained whole
    ended        whether fairseq-train came to its end (or may still be at work)
    train ppl    in training, with dropout, in the epoch of the best validation; where epochs are shards of the text,
                 of the last 4,000 updates
    valid ppl    that of valid.txt; where there is none, the lowest of the log
    tokens/s     median of the log's lines in training, target tokens
    s an epoch   median, without validation
    wall time    of training and validation, as fairseq counts it, resumed trainings added up
    precision    float32, bfloat16 or float16
    hardware     the processor, how many threads it may have, and GPUs that are there
    commit       of this repository when training began, "+" where files had been changed
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Sequence

import start

from mixtape_plugin.analysis.groups import Group, add_mean, find_baseline, groups, leave_out_repeats, rename
from mixtape_plugin.analysis.overview import overview_markdown, read_overview
from mixtape_plugin.analysis.pages import blocks_of, filled
from mixtape_plugin.analysis.result_pictures import (
    draw_correlation,
    draw_curves,
    draw_differences,
    draw_lines,
    draw_overview,
    speeds_in_turns,
)
from mixtape_plugin.analysis.results import (
    CURVE,
    NOT_RUN,
    SHOWN,
    UNKNOWN,
    collect,
    columns_of,
    csv_columns,
    csv_row,
    markdown,
    read_rows,
    value_of,
    value_of_flag,
)
from mixtape_plugin.analysis.selection import asked_for, chosen
from mixtape_plugin.analysis.statistics import P_VALUES, compare, correlate, groups_markdown
from mixtape_plugin.drawing import check_picture
from mixtape_plugin.errors import UserError
from mixtape_plugin.files import check_outputs, read_lines, write_csv, write_outputs, write_text


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="DIR", help="folders that train.sh wrote, or CSV files of --csv")
    parser.add_argument("--columns", metavar="A,B,…", help="only these columns, in this order")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="TEXT",
        help="only trainings whose command has this, or these; of --overview only lines whose name does",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="TEXT", help="only those whose command, or name, has none"
    )
    parser.add_argument("--ended", action="store_true", help="only trainings that came to their end")
    parser.add_argument(
        "--page",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="make the tables of these pages anew, and nothing else",
    )
    parser.add_argument("--overview", type=Path, metavar="FILE", help="one table out of several of --groups-csv")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table here")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the numbers, commands and signatures here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw validation perplexity by updates and hours")
    parser.add_argument(
        "--speeds",
        metavar="TEXT",
        help="hours of --plot at the networks' speeds in trainings whose command has this, which ran in turns",
    )
    parser.add_argument("--draw", nargs=3, metavar=("X", "Y", "PNG"), help="also draw a column over others")
    parser.add_argument("--groups", action="store_true", help="also mean ± standard deviation over seeds")
    parser.add_argument(
        "--name",
        nargs=2,
        action="append",
        default=[],
        metavar=("GROUP", "NAME"),
        help="call a group by another name in tables of --groups and in pictures; of the others, --baseline too",
    )
    parser.add_argument(
        "--mean",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "COLUMN"),
        help="a further column, of each training the mean of these",
    )
    parser.add_argument("--baseline", metavar="LAYER", help="also t-tests against this group's (implies --groups)")
    parser.add_argument(
        "--differences", type=Path, metavar="PNG", help="also draw how far groups are from --baseline, or in --overview"
    )
    parser.add_argument("--groups-csv", type=Path, metavar="FILE", help="also write means over seeds here")
    parser.add_argument("--correlate", nargs=2, metavar="COLUMN", help="also Pearson's r of these two columns")
    parser.add_argument("--range", nargs=2, type=float, metavar=("LO", "HI"), help="of the second column, what counts")
    parser.add_argument("--scatter", type=Path, metavar="PNG", help="draw it here (default: correlation.png)")
    args = parser.parse_args(argv)
    if args.correlate and not args.scatter:
        args.scatter = Path("correlation.png")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.page:
        stands_alone(args, "page")
        write_pages(args.page)
    else:
        print(report(args), end="")


def stands_alone(args: argparse.Namespace, option: str, *beside: str) -> None:
    """Raises UserError where an option is given that means nothing beside this one."""
    given = [name for name, value in vars(args).items() if value and name not in (option, *beside)]
    if given:
        alone = "stands alone" if not beside else f"goes with no option but --{', --'.join(beside)}"
        value = getattr(args, option)
        words = shlex.join(map(str, value if isinstance(value, list) else [value]))
        raise UserError(f"--{option} {words} {alone}: leave out {given[0].replace('_', '-')}")


def write_pages(paths: Sequence[Path]) -> None:
    """Fills each block of these Markdown pages with what its arguments print.

    No page is written before all blocks of all pages have been run; files that blocks write are not taken back.
    """
    texts = {path: "".join(read_lines(path)) for path in paths}
    asked = {
        (path, place): parse_block(path, words)
        for path, text in texts.items()
        for place, words in blocks_of(path, text).items()
    }
    tables = {path: {} for path in paths}
    for path, place in sorted(asked, key=lambda block: bool(asked[block].overview)):  # last: it reads what others write
        tables[path][place] = report(asked[path, place])
    for path, text in texts.items():
        write_text(path, filled(text, tables[path]))


def parse_block(path: Path, words: Sequence[str]) -> argparse.Namespace:
    """What a block of a page asks for."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse(words)
    except SystemExit:  # by argparse, whose last line says why
        why = said.getvalue().strip().rpartition("\n")[2].partition("error: ")[2]
        raise UserError(f"--page {path}: {shlex.join(words)!r} is not allowed: {why or '--help'}") from None


def check(args: argparse.Namespace) -> None:
    """Raises UserError for the first option that is not allowed."""
    if args.overview:
        stands_alone(args, "overview", "columns", "where", "without", "markdown", "differences")
    pictures = {
        "--plot": args.plot,
        "--draw": args.draw and Path(args.draw[2]),
        "--differences": args.differences,
        "--scatter": args.scatter,
    }
    for option, path in pictures.items():
        check_picture(option, path)
    for option, value in (("--range", args.range), ("--scatter", args.scatter)):
        if value and not args.correlate:
            raise UserError(f"{option} {value} needs --correlate: name two columns")
    if args.differences and not (args.baseline or args.overview):
        raise UserError(
            f"--differences {args.differences} needs --baseline: name the layer that others are compared with"
        )
    if args.speeds and not args.plot:
        raise UserError(f"--speeds {args.speeds} needs --plot: name a picture")
    if args.name and not (args.groups or args.baseline or args.groups_csv or args.plot):
        raise UserError(f"--name {shlex.join(args.name[0])} needs --groups, --baseline, --groups-csv or --plot")

    outputs = {"--markdown": args.markdown, "--csv": args.csv, "--groups-csv": args.groups_csv, **pictures}
    tables = [path for path in args.folders if path.endswith(".csv")]
    grows = [path for path in tables if args.csv and os.path.realpath(path) == os.path.realpath(args.csv)]
    check_outputs(outputs, [path for path in tables if path not in grows])
    if grows and (args.where or args.without or args.ended):
        raise UserError(
            f"--csv {args.csv} is read, too, and would lose rows by --where, --without and --ended: choose another"
        )
    if not args.folders and not args.overview:
        raise UserError("no training is given: name folders that train.sh wrote, or CSV files of --csv")


def all_rows(folders: Sequence[str]) -> list[dict]:
    """A row for each training in these folders and CSV files; what is damaged in a folder is said."""
    found = []
    for folder in folders:
        if folder.endswith(".csv"):
            found += read_rows(folder)
            continue
        row, damaged = collect(folder)
        found.append(row)
        for sentence in damaged:
            print(f"collect_results.py: {sentence}", file=sys.stderr)
    rows, places = [], {}
    for row in found:  # a folder and the CSV file that has its row, or a copy, which has its curve: no two seeds
        keys = [(os.path.abspath(row["folder"]), row["command"])]
        if row["curve"] and row["command"] != UNKNOWN:
            keys.append((*(row[name] for name in ("command", "seed", "commit", "parameters")), csv_row(row)[CURVE]))
        place = next((places[key] for key in keys if key in places), None)
        if place is None:
            place = len(rows)
            rows.append(row)
        else:
            print(f"collect_results.py: {row['folder']} is given twice; the last one counts", file=sys.stderr)
            rows[place] = with_notes(row, rows[place])
        places.update(dict.fromkeys(keys, place))
    return rows


def with_notes(row: dict, earlier: dict) -> dict:
    """The row with the text of columns that somebody added to its earlier one, in a CSV file."""
    notes = {name: value for name, value in earlier.get("analyses", {}).items() if isinstance(value, str)}
    return {**row, **notes, "analyses": {**row.get("analyses", {}), **notes}} if notes else row


def split_columns(text: str, known: Sequence[str]) -> list[str]:
    """The names between commas; of names that are known, one may have a comma itself."""
    parts, names = [part.strip() for part in text.split(",")], []
    while parts:
        size = next((size for size in range(len(parts), 1, -1) if ", ".join(parts[:size]) in known), 1)
        names.append(", ".join(parts[:size]))
        del parts[:size]
    return names


def report(args: argparse.Namespace) -> str:
    """What is printed: the tables that are asked for. Files that are asked for are written."""
    check(args)
    if args.overview:
        return report_overview(args)
    rows = all_rows(args.folders)
    speeds = args.speeds and speeds_in_turns(rows, args.speeds)
    rows = asked_for(rows, args.where, args.without, args.ended)
    of_groups = args.groups or args.baseline
    known = [*csv_columns(rows), *(("group", "n") if of_groups else ()), *(P_VALUES if args.baseline else ())]
    means = [name for name, *_ in args.mean]
    for name, *parts in args.mean:
        add_mean(rows, name, parts, known)
        known.append(name)
    by_shown_name = {shown: name for name, shown in SHOWN.items()}
    columns = args.columns and [by_shown_name.get(name, name) for name in split_columns(args.columns, known)]
    over = split_columns(args.draw[0], known) if args.draw else []
    flags = []
    for name in dict.fromkeys((*(columns or ()), *(args.correlate or ()), *over, *(args.draw or ())[1:2])):
        if name not in known and any(value_of_flag(row["command"], name) for row in rows):
            flags.append(name)
            for row in rows:
                row[name] = value_of_flag(row["command"], name) or "–"
    known += flags
    unknown = [name for name in columns or () if name not in known]
    if unknown:
        raise UserError(f"--columns {unknown[0]} is none of {', '.join(columns_of(rows))}")
    text, lines, correlation = markdown(rows, columns or [*columns_of(rows), *means]), [], None
    found = groups(rows)
    rename(found, args.name)
    if of_groups or args.groups_csv:
        for repeat, first in leave_out_repeats(found):
            print(f"collect_results.py: {repeat} has the seed of {first}, which counts instead", file=sys.stderr)
        baseline = find_baseline(found, args.baseline) if args.baseline else None
        lines = compare(found, baseline, means)
    if of_groups:
        of_several = {*P_VALUES, *(name for line in lines for name in line if name != "command")}
        alone = [name for name in columns or () if name not in of_several]
        if alone:
            raise UserError(f"--columns {alone[0]} is of single trainings, and --groups puts several into one line")
        over_seeds = groups_markdown(found, lines, baseline, columns)
        text = over_seeds if columns else f"{text}\n{over_seeds}"
    measured = [{**row, **{name: value_of(row[name]) for name in flags}} for row in rows]
    if args.correlate:
        correlation = correlate(measured, *args.correlate, args.range)
        text += (
            f"\n{args.correlate[1]} over {args.correlate[0]}: Pearson r = {correlation.r:.3f}, "
            f"p = {correlation.p:.3g}, n = {len(correlation.rows)} ({args.scatter})\n"
        )
    write_outputs(
        ("--markdown", args.markdown, lambda path: write_text(path, text)),
        ("--csv", args.csv, lambda path: save_csv(path, rows)),
        ("--groups-csv", args.groups_csv, lambda path: save_groups(path, lines)),
        ("--plot", args.plot, lambda path: save_plot(path, found, speeds)),
        ("--draw", args.draw and args.draw[2], lambda path: draw_lines(path, measured, over, args.draw[1])),
        ("--differences", args.differences, lambda path: draw_differences(path, lines, baseline.name, columns)),
        ("--scatter", args.scatter, lambda path: draw_correlation(path, correlation, *args.correlate)),
    )
    return text


def report_overview(args: argparse.Namespace) -> str:
    """The table of --overview."""
    score = (args.columns or "test ppl").strip()
    found = read_overview(args.overview, score, lambda name: chosen(name, args.where, args.without))
    outputs = {"--markdown": args.markdown, "--differences": args.differences}
    check_outputs(outputs, [args.overview, *(comparison.groups for comparison in found)])
    text = overview_markdown(found, score)
    write_outputs(
        ("--markdown", args.markdown, lambda path: write_text(path, text)),
        ("--differences", args.differences, lambda path: draw_overview(path, found, score)),
    )
    return text


def save_csv(path: str | Path, rows: Sequence[dict]) -> None:
    columns = csv_columns(rows)
    cells = map(csv_row, rows)
    write_csv(path, columns, ({column: row.get(column, NOT_RUN) for column in columns} for row in cells))


def save_groups(path: str | Path, lines: Sequence[dict]) -> None:
    columns = list(dict.fromkeys(name for line in lines for name in line))
    write_csv(path, columns, ({name: line.get(name) for name in columns} for line in lines))  # None is an empty cell


def save_plot(path: str | Path, found: Sequence[Group], speeds: dict[tuple, float] | None) -> None:
    found = [replace(group, rows=list(filter(has_curve, group.rows))) for group in found]
    found = [group for group in found if group.rows]
    if not found:
        raise UserError(f"--plot {path} has nothing to show: none of the logs has a validation that gave a number")
    draw_curves(path, found, speeds)


def has_curve(row: dict) -> bool:
    return any(map(math.isfinite, row["curve"].values()))


if __name__ == "__main__":
    start.run(main)
