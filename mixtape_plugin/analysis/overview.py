"""One table of several comparisons: how far layers are from a baseline, a line for each kind of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from mixtape_plugin.analysis.results import NOT_RUN, digits, value_of
from mixtape_plugin.analysis.statistics import difference_text, interval_of, is_ratio
from mixtape_plugin.errors import UserError
from mixtape_plugin.files import read_csv
from mixtape_plugin.tables import table

FIRST = ("trainings", "groups")
BLANK = {"": NOT_RUN, "–": "–"}  # cells without a group -> what the table has there


@dataclass
class Difference:
    """How far a group's mean is from the baseline's, in percent for perplexities; n trainings.

    ``low`` and ``high`` are the ends of its 95% interval; None where both are single trainings without one.
    """

    middle: float
    low: float | None
    high: float | None
    n: int


@dataclass
class Comparison:
    """A line of the overview: the baseline's score as text; by layer a difference, or text where it has none."""

    name: str
    groups: str
    baseline: str
    cells: dict  # the baseline, first, has None


def read_overview(path: str | Path, score: str, chosen: Callable[[str], bool] = bool) -> list[Comparison]:
    """The comparisons that a CSV file names.

    Args:
        path: its columns are ``trainings``, what the line is called; ``groups``, a CSV file of ``--groups-csv``, from
            the present folder; and a column for each layer, the baseline first, with the name that its group has in
            that file. An empty cell was not run; one with "–" stays as it is.
        score: the column that is compared, such as "test ppl".
        chosen: whether the line of a name counts; of others no table is read.

    Raises:
        UserError: a file cannot be read, no line is chosen, a group or its score is missing, or ``groups`` compares
            with another baseline or with none.
    """
    lines = read_csv(path, FIRST, f"is no overview: it must have the columns {', '.join(FIRST)}, and a row")
    layers = [name for name in lines[0] if name not in FIRST]
    if len(layers) < 2:
        raise UserError(f"{path} must have a column for the baseline and one for each other layer")
    baseline, *others = layers
    found = []
    for line in filter(lambda line: chosen(line["trainings"]), lines):
        name, source = line["trainings"], line["groups"]
        if not source:
            raise UserError(f"{path}: {name!r} has no file under groups: name one of collect_results.py --groups-csv")
        known = read_groups(source, score)
        for layer in layers:
            group = line[layer]
            if group not in known and (layer == baseline or group not in BLANK):
                more = "" if layer == baseline else ", or nothing or – where it was not run"
                raise UserError(
                    f"{path}: {layer} of {name!r} is {group!r}: it must be a group of {source}, "
                    f"one of {', '.join(known)}{more}"
                )
        origin = known[line[baseline]]
        cells = {
            layer: BLANK[line[layer]] if line[layer] in BLANK else difference(known[line[layer]], origin, score, source)
            for layer in others
        }
        found.append(Comparison(name, source, mean(origin, score), {baseline: None, **cells}))
    if not found:
        raise UserError(f"--where and --without leave no line of {path}")
    return found


def read_groups(path: str | Path, score: str) -> dict:
    """The lines of a table of ``--groups-csv`` that have the score, by the group's name."""
    names = ("group", score, f"{score} sd", f"{score} n")
    rows = read_csv(path, names, f"is no table of --groups-csv that has {score}: a score such as test ppl is compared")
    known = {}
    for row in rows:
        group = {name: value_of(text) for name, text in row.items()}
        value = group[score]
        if not isinstance(value, (int, float)) or not math.isfinite(value) or (is_ratio(score) and value <= 0):
            continue
        if row["group"] in known:
            raise UserError(f"{path} has two groups called {row['group']!r}: tell them apart by --name")
        known[row["group"]] = group
    return known


def difference(group: dict, origin: dict, score: str, source: str) -> Difference:
    middle, low, high = interval_of(group, score)
    numbers = group[f"{score} n"], origin[f"{score} n"]
    if interval_of(origin, score)[0] is not None or (middle is None and max(numbers) > 1):
        raise UserError(
            f"{source} does not compare {score} of {group['group']!r} with {origin['group']!r}: "
            f"write it with --baseline {origin['group']!r}"
        )
    if middle is None:  # two single trainings
        middle = 100 * (group[score] / origin[score] - 1) if is_ratio(score) else group[score] - origin[score]
    return Difference(middle, low, high, numbers[0])


def mean(group: dict, score: str) -> str:
    decimals, deviation = digits(score), group[f"{score} sd"]
    scatter = "" if deviation is None else f" ± {deviation:,.{decimals}f}"
    return f"{group[score]:,.{decimals}f}{scatter} ({group[f'{score} n']})"


def overview_markdown(found: Sequence[Comparison], score: str) -> str:
    """A table with a line for each comparison, and what its cells say."""
    baseline, *layers = found[0].cells

    def cell(value):
        if isinstance(value, str):
            return value
        return f"{difference_text(score, value.middle, value.low, value.high)} ({value.n})"

    lines = ([each.name, each.baseline, *(cell(each.cells[layer]) for layer in layers)] for each in found)
    return (
        table((score, baseline, *layers), lines)
        + f"\n{baseline}: mean ± sample standard deviation. Others: difference of means, 95% interval, corrected "
        "(Bonferroni) for all that are compared in its setting. The scatter of seeds is pooled over it, as if "
        "it were the same for all, so that a single training has an interval, too, unless all are single. (n): "
        "trainings, which differ in their seed alone.\n"
    )
