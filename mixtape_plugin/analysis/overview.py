"""One table of several comparisons: how far layers are from a baseline, a line for each kind of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from mixtape_plugin.analysis.results import NOT_RUN, digits, table, value_of
from mixtape_plugin.analysis.statistics import difference_text, is_ratio
from mixtape_plugin.errors import UserError
from mixtape_plugin.files import read_csv

FIRST = ("trainings", "groups")
BLANK = {"": NOT_RUN, "–": "–"}  # cells without a group -> what the table has there


@dataclass
class Difference:
    """How far a group's mean is from the baseline's, in percent for perplexities; n trainings.

    ``low`` and ``high`` are the ends of its 95% interval, None where the scatter of seeds is not known.
    """

    middle: float
    low: float | None
    high: float | None
    n: int


@dataclass
class Comparison:
    """A line of the overview: the baseline's score as text; by layer a difference, or text where it has none."""

    name: str
    baseline: str
    cells: dict  # the baseline, first, has None


def read_overview(path: str | Path, score: str) -> list[Comparison]:
    """The comparisons that a CSV file names.

    Args:
        path: its columns are ``trainings``, what the line is called; ``groups``, a CSV file of ``--groups-csv``, from
            the present folder; and a column for each layer, the baseline first, with the name that its group has in
            that file. An empty cell was not run; one with "–" stays as it is.
        score: the column that is compared, such as "test ppl".

    Raises:
        UserError: a file cannot be read, a group or its score is missing, or ``groups`` compares with another baseline.
    """
    lines = read_csv(path, FIRST, f"is no overview: it must have the columns {', '.join(FIRST)}, and a row")
    baseline, *others = [name for name in lines[0] if name not in FIRST] or [None]
    if not others:
        raise UserError(f"{path} must have a column for the baseline and one for each other layer")
    found = []
    for line in lines:
        source = line["groups"]
        known = read_csv(source, ("group", score), f"is no table of --groups-csv with groups and their {score}")
        known = {group["group"]: {column: value_of(text) for column, text in group.items()} for group in known}
        asked = [line[layer] for layer in (baseline, *others) if layer == baseline or line[layer] not in BLANK]
        for name in asked:
            if name not in known:
                raise UserError(f"{path}: {name!r} is no group of {source}: it must be one of {', '.join(known)}")
            if not isinstance(known[name][score], (int, float)):
                raise UserError(f"{path}: {name!r} of {source} has no {score}")
        origin = known[line[baseline]]
        if origin.get(f"{score}, difference") is not None:
            raise UserError(f"{path}: {line[baseline]!r} is not what {source} compares others with")
        cells = {
            layer: BLANK[line[layer]] if line[layer] in BLANK else difference(known[line[layer]], origin, score)
            for layer in others
        }
        found.append(Comparison(line["trainings"], mean(origin, score), {baseline: None, **cells}))
    return found


def difference(group: dict, origin: dict, score: str) -> Difference:
    middle, low, high = (group.get(f"{score}, {end}") for end in ("difference", "lowest", "highest"))
    if middle is None:  # of single trainings: nothing tells how seeds scatter
        middle = 100 * (group[score] / origin[score] - 1) if is_ratio(score) else group[score] - origin[score]
    return Difference(middle, low, high, group[f"{score} n"])


def mean(group: dict, score: str) -> str:
    decimals, deviation = digits(score), group[f"{score} sd"]
    scatter = "" if deviation is None else f" ± {deviation:.{decimals}f}"
    return f"{group[score]:.{decimals}f}{scatter} ({group[f'{score} n']})"


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
        + f"\n{baseline}: mean ± sample standard deviation. Others: how far their mean is from it, with 95% intervals "
        "where seeds tell them. (n): trainings, which differ in their seed alone.\n"
    )
