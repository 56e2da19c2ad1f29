"""How far groups of trainings are apart and how surely, and correlation of two columns."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Iterable, Sequence

from scipy import stats

from mixtape_plugin.analysis.groups import Group, Sample, numbers
from mixtape_plugin.analysis.results import (
    BITS,
    LANGUAGE_MODEL,
    NOT_RUN,
    TRANSLATION,
    columns_of,
    digits,
    signatures,
)
from mixtape_plugin.errors import UserError
from mixtape_plugin.tables import table

PERPLEXITIES = ("valid ppl", "test ppl", *LANGUAGE_MODEL)
# What is compared, beside all scores that have a signature
TESTED = (*PERPLEXITIES, *BITS[1:], *(f"valid {name}" for name in TRANSLATION), *TRANSLATION)
P_VALUES = ("p Student", "p Welch")
OF_P = tuple(f"{test}, " for test in P_VALUES)  # how the names of their columns begin
NOT_MEASURED = ("training", "layer", "seed", "updates", "ended", "wall s", "commit")


def p_values(first: Sample | None, second: Sample | None) -> tuple:
    """p of the unpaired two-sided t-test, Student's (equal variances, which Parthiban et al. print) and Welch's.

    None each where a group has fewer than two values, or neither varies.
    """
    if None in (first, second) or None in (first.std, second.std) or first.std == second.std == 0:
        return None, None
    summary = (first.mean, first.std, first.n, second.mean, second.std, second.n)
    return tuple(
        float(stats.ttest_ind_from_stats(*summary, equal_var=equal_variances).pvalue)
        for equal_variances in (True, False)
    )


@dataclass
class Scatter:
    """What trainings of one command differ by: the standard deviation within the groups, pooled over all of them.

    s² = Σ_groups Σ_seeds (y − mean of the group)² / df, df = Σ_groups (n − 1). Of a perplexity y is the logarithm, so
    that differences are ratios.
    """

    std: float
    df: int

    def half_width(self, first: int, second: int, comparisons: int = 1) -> float:
        """Of the 95% interval of the difference of two means of so many trainings; of several comparisons together by
        Bonferroni's inequality."""
        return float(stats.t.ppf(1 - 0.025 / comparisons, self.df)) * self.std * math.sqrt(1 / first + 1 / second)


def is_ratio(column: str) -> bool:
    """Whether the column's differences are told in percent."""
    return column.endswith("ppl") or column in PERPLEXITIES


def scores_of(group: Group, column: str) -> list:
    """The group's values, of perplexities the logarithms."""
    values = numbers(group.rows, column)
    return [math.log(value) for value in values if value > 0] if is_ratio(column) else values


def scatter(found: Sequence[Group], column: str) -> Scatter | None:
    """None where no group has two values, or none of them differ."""
    samples = [values for values in (scores_of(group, column) for group in found) if len(values) > 1]
    df = sum(len(values) - 1 for values in samples)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in samples)
    return Scatter(math.sqrt(squares / df), df) if df and squares else None


def differences(found: Sequence[Group], baseline: Group, column: str) -> dict:
    """By the group's name: its mean's difference from the baseline's, and the ends of its 95% interval.

    In percent for perplexities (of geometric means), else in the column's unit. The intervals of one score hold
    together in 95 of 100 cases, where all groups' seeds scatter alike: a group of a single training has one too.
    """
    pooled, origin = scatter(found, column), scores_of(baseline, column)
    others = [(group, scores_of(group, column)) for group in found if group is not baseline]
    others = [(group, values) for group, values in others if values]
    if pooled is None or not origin:
        return {}
    apart = {}
    for group, values in others:
        middle = statistics.fmean(values) - statistics.fmean(origin)
        half = pooled.half_width(len(values), len(origin), len(others))
        ends = (middle, middle - half, middle + half)
        apart[group.name] = tuple(100 * math.expm1(end) for end in ends) if is_ratio(column) else ends
    return apart


ENDS = ("difference", "lowest", "highest")  # a score's columns "…, difference" and so on, which compare() fills in


def interval_of(line: dict, column: str) -> tuple:
    """The difference from the baseline and the ends of its interval; None each where a line has none."""
    return tuple(line.get(f"{column}, {end}") for end in ENDS)


def compared_in(names: Iterable[str]) -> list:
    """The scores whose differences are among these columns."""
    return [name[: -len(f", {ENDS[0]}")] for name in names if name.endswith(f", {ENDS[0]}")]


def difference_text(column: str, middle: float, low: float | None, high: float | None) -> str:
    """A difference of this column, and its interval where it has one, whose end of -0.0 says that 0 is outside."""
    decimals, unit = (1, "%") if is_ratio(column) else (digits(column), "")
    known = [round(middle, decimals) + 0.0, *(end for end in (low, high) if end is not None)]  # no -0.0 in the middle
    texts = [f"{value:+.{decimals}f}" for value in known]
    return texts[0] + unit + (f" [{texts[1]}, {texts[2]}]" if low is not None else "")


def compare(found: Sequence[Group], baseline: Group | None = None, means: Sequence[str] = ()) -> list[dict]:
    """A line for each group, as a dictionary.

    Columns: ``group``, ``n``, ``command``; mean and, with " sd" and " n" after the name, standard deviation and number
    of what is measured; and of each score its :func:`differences` from the baseline, "…, difference", "…, lowest" and
    "…, highest", and "p Student, …" and "p Welch, …". Columns of :func:`add_mean`, ``means``, are scores, too.
    """
    columns = [name for name in columns_of([row for group in found for row in group.rows]) if name not in NOT_MEASURED]
    columns += means
    rows = [row for group in found for row in group.rows]
    signed = (name for name in columns if any(f"{name} signature" in row for row in rows))
    lines, tested = [], {*TESTED, *means, *signed}
    apart = {column: differences(found, baseline, column) for column in columns if baseline and column in tested}
    for group in found:
        line = {"group": group.name, "n": len(group.rows), "command": group.command}
        for column in columns:
            sample = group.sample(column)
            line[column], line[f"{column} sd"] = (sample.mean, sample.std) if sample else (None, None)
            line[f"{column} n"] = sample.n if sample else 0
            if baseline is None or group is baseline or column not in tested:
                continue
            ends = apart[column].get(group.name, (None, None, None))
            line.update(zip((f"{column}, {end}" for end in ENDS), ends))
            line.update(zip((f"{test}, {column}" for test in P_VALUES), p_values(sample, baseline.sample(column))))
        lines.append(line)
    return lines


def groups_markdown(
    found: Sequence[Group],
    lines: Sequence[dict],
    baseline: Group | None = None,
    columns: Sequence[str] | None = None,
) -> str:
    """The lines of :func:`compare` as a Markdown table, without the columns that no group has anything in.

    With ``columns`` only ``group``, ``n``, those, and how far they differ; how surely, where ``columns`` has
    "p Student" or "p Welch"; and the signatures of scores.
    """
    names = dict.fromkeys(name for line in lines for name in line if line[name] is not None)
    hidden = ("command", " sd", " n", ", lowest", ", highest")
    shown = [name for name in names if not name.endswith(hidden)]
    if columns:
        more = [f"{name}, difference" for name in columns]
        more += [f"{test}, {name}" for name in columns for test in P_VALUES if test in columns]
        shown = [name for name in dict.fromkeys(("group", "n", *columns, *more)) if name in shown]
    compared = compared_in(shown)

    def value(line, name):
        number = line.get(name)
        if isinstance(number, str) or name == "n":
            return str(number)
        if number is None:
            return "" if name.startswith(OF_P) or name.endswith(", difference") else NOT_RUN
        if name.startswith(OF_P):
            return f"{number:.3g}"
        if name.endswith(", difference"):
            (column,) = compared_in([name])
            return difference_text(column, *interval_of(line, column))
        deviation = line.get(f"{name} sd")
        if not deviation and (isinstance(number, int) or not digits(name)):  # parameters, what is counted, speeds
            return f"{number:,.0f}"
        text = f"{number:,.{digits(name)}f}"
        text = text if deviation is None else f"{text} ± {deviation:,.{digits(name)}f}"
        return text if line[f"{name} n"] == line["n"] else f"{text} (n = {line[f'{name} n']})"

    text = table(shown, ([value(line, name) for name in shown] for line in lines))
    each_seed_once = all(len({row["seed"] for row in group.rows}) == len(group.rows) for group in found)
    apart = " that differ in their seed alone" if each_seed_once else ""
    text += f"\nMean ± sample standard deviation of n trainings{apart}.\n"
    if compared:
        text += (
            f"difference: from {baseline.name}, with 95% intervals that hold together within a column (Bonferroni), if "
            f"all groups' seeds scatter alike: their scatter is pooled. {chance_of_seeds(found, compared)}\n"
        )
    of_p = {name.split(", ", 1)[1] for name in shown if name.startswith(OF_P)}
    if of_p:
        tests = sum(line.get(f"{P_VALUES[0]}, {name}") is not None for line in lines for name in of_p)
        text += (
            f"p: unpaired two-sided t-test against {baseline.name}, equal variances (Student) and not (Welch); "
            f"{tests} comparison{'' if tests == 1 else 's'}, not corrected for their number: "
            "where nothing differs one in twenty has p < .05.\n"
        )
    return text + (signatures([row for group in found for row in group.rows], shown) if columns else "")


def chance_of_seeds(found: Sequence[Group], columns: Sequence[str]) -> str:
    """How far apart two single trainings are by their seeds."""
    apart = []
    for column in columns:
        pooled = scatter(found, column)
        width = pooled.half_width(1, 1)
        text = f"{100 * math.expm1(width):.1f}%" if is_ratio(column) else f"{width:.{digits(column)}f}"
        apart.append(f"{text} in {column} ({pooled.df} degrees of freedom)")
    return f"Two trainings that differ in their seed alone are in 95 of 100 cases less than {', '.join(apart)} apart."


@dataclass
class Correlation:
    """Pearson's r, its two-sided p, and the trainings that it is of."""

    r: float
    p: float
    rows: list


def correlate(rows: Sequence[dict], x: str, y: str, within: tuple | None = None) -> Correlation:
    """Pearson's correlation of two columns, over the trainings that have both.

    Args:
        within: lowest and highest value of y that counts.

    Raises:
        UserError: fewer than three trainings have both, or one of the columns does not vary.
    """
    known = sorted({name for row in rows for name in row if numbers([row], name)})
    for name in (x, y):
        if name not in known:
            raise UserError(f"--correlate {name} is no column with numbers: these trainings have {', '.join(known)}")
    both = [row for row in rows if numbers([row], x) and numbers([row], y)]
    if within:
        both = [row for row in both if within[0] <= row[y] <= within[1]]
    if len(both) < 3:
        raise UserError(f"--correlate {x} {y} needs at least 3 trainings that have both, there are {len(both)}")
    if any(len(set(numbers(both, name))) == 1 for name in (x, y)):
        raise UserError(f"--correlate {x} {y} has nothing to show: all trainings have the same value of one of them")
    found = stats.pearsonr(numbers(both, x), numbers(both, y))
    return Correlation(float(found[0]), float(found[1]), both)
