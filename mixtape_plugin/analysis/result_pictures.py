"""What scripts/collect_results.py draws: curves, one column over another, differences, an overview, a correlation."""

from __future__ import annotations

import functools
import math
import statistics
import textwrap
from pathlib import Path
from typing import Mapping, Sequence

from mixtape_plugin.analysis.groups import Group, numbers
from mixtape_plugin.analysis.overview import Comparison, Difference
from mixtape_plugin.analysis.selection import has
from mixtape_plugin.analysis.statistics import Correlation, compared_in, interval_of, is_ratio
from mixtape_plugin.drawing import pyplot, save
from mixtape_plugin.errors import UserError

MOST_IN_A_PANEL = 8  # names of a legend beside its curves


def draw_curves(path: str | Path, found: Sequence[Group], speeds: Mapping[tuple, float] | None = None) -> None:
    """Validation perplexity against updates and, where it is known, against the hours that they take in training.

    Trainings that differ in seed alone have one colour: their mean and a band from the lowest to the highest, or, where
    they were validated at different updates, a line each. Only up to 2.5 times the lowest, and to what trainings have
    after a quarter of their updates, with each training's end in view: ends are what is compared.

    Args:
        found: groups of trainings, each of which was validated.
        speeds: tokens a second of networks, by :func:`network_of`, that were measured in turns. Hours are at these
            speeds then, and no other network has any; else each training's are its own, on a machine more or less busy.
    """
    plt = pyplot()
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    hours = functools.partial(hours_of_training, speeds=speeds)
    abscissae = {"updates": lambda row: list(row["curve"])}
    if any(hours(row) for group in found for row in group.rows):
        abscissae["hours of training" + (", at speeds measured in turns" if speeds else "")] = hours
    figure, panels = plt.subplots(
        1, len(abscissae), figsize=(1 + 6 * len(abscissae), 4.5), sharey=True, squeeze=False, constrained_layout=True
    )
    colors = plt.get_cmap("tab10" if len(found) <= 10 else "tab20").colors
    for axes, (xlabel, abscissa) in zip(panels[0], abscissae.items()):
        for number, group in enumerate(found):
            name, seeds = group.name, {row["seed"] for row in group.rows}
            if len(group.rows) > 1:
                name += f", {len(group.rows)} {'seeds' if len(seeds) == len(group.rows) else 'trainings'}"
            name = textwrap.fill(name, 45, break_on_hyphens=False)  # the legend stays in its panel
            known = list(filter(abscissa, group.rows))
            alike = len({tuple(row["curve"]) for row in known}) == 1
            for together in [known] if alike else [[row] for row in known]:
                x = [statistics.median(places) for places in zip(*map(abscissa, together))]
                at = list(zip(*(row["curve"].values() for row in together)))
                color, marker = colors[number % len(colors)], "o" if len(x) < 30 else None
                axes.plot(x, list(map(statistics.fmean, at)), marker=marker, markersize=3, color=color, label=name)
                if len(together) > 1:
                    axes.fill_between(x, list(map(min, at)), list(map(max, at)), color=color, alpha=0.25, linewidth=0)
                name = None  # once in the legend
        axes.set(yscale="log", xlabel=xlabel)
        axes.grid(alpha=0.3, which="both")
    first = panels[0][0]
    curves = [row["curve"] for group in found for row in group.rows]
    lowest = min(min(curve.values()) for curve in curves)
    highest_end = max(list(curve.values())[-1] for curve in curves)
    later = max(perplexity for curve in curves for at, perplexity in curve.items() if at >= max(curve) / 4)
    low, high = first.get_ylim()
    low, high = first.set_ylim(max(low, lowest / 1.05), min(high, 1.05 * max(min(2.5 * lowest, later), highest_end)))
    first.set_ylabel("validation perplexity")
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 10 * low else MaxNLocator(8))
    first.yaxis.set_major_formatter(ScalarFormatter())
    first.yaxis.set_minor_formatter(NullFormatter())
    if len(found) <= MOST_IN_A_PANEL:
        first.legend()
    else:  # it would cover the ends of the curves
        figure.set_size_inches(figure.get_figwidth() + 3, figure.get_figheight())
        figure.legend(loc="outside right upper", handles=first.get_legend_handles_labels()[0])
    save(figure, path)


def network_of(row: dict) -> tuple:
    """What a network's speed is known by: the layer, with K, and the number of parameters."""
    return row["layer"], row["parameters"]


def speeds_in_turns(rows: Sequence[dict], text: str) -> dict[tuple, float]:
    """Tokens a second of each network, by :func:`network_of`: the median of trainings whose command has the text."""
    measured = {}
    for row in rows:
        if has(row["command"], text) and row["tokens/s"] is not None:
            measured.setdefault(network_of(row), []).append(row["tokens/s"])
    if not measured:
        raise UserError(f"--speeds {text} is in no command of a training whose speed is known")
    return {network: statistics.median(speeds) for network, speeds in measured.items()}


def hours_of_training(row: dict, speeds: Mapping[tuple, float] | None = None) -> list[float] | None:
    """When each validation was due at the training's median speed: no standstill, and nothing done twice, counts.

    At the network's speed in ``speeds`` instead, where these are given. None where it was not validated once an epoch,
    or its speed is not known.
    """
    validations, seconds = list(row["curve"]), row["s an epoch"]
    if not validations or len(validations) != row["epochs"] or seconds is None:
        return None
    if speeds is not None:
        if network_of(row) not in speeds or row["tokens/s"] is None:
            return None
        seconds *= row["tokens/s"] / speeds[network_of(row)]
    return [updates / validations[0] * seconds / 3600 for updates in validations]


def draw_lines(path: str | Path, rows: Sequence[dict], columns: Sequence[str], y: str) -> None:
    """One column over each of others, a panel each, a line for each layer: means of the trainings with the same x, with
    their deviations."""
    found = {x: [row for row in rows if numbers([row], x) and numbers([row], y)] for x in columns}
    for x, both in found.items():
        if not both:
            raise UserError(f"--draw {x} {y} has nothing to draw: no training has numbers for both")
    plt = pyplot()
    from matplotlib.ticker import LogLocator

    figure, panels = plt.subplots(
        1, len(found), figsize=(6 * len(found), 4.5), sharey=True, squeeze=False, constrained_layout=True
    )
    colors = {layer: f"C{n}" for n, layer in enumerate(dict.fromkeys(row["layer"] for row in rows))}
    for axes, (x, both) in zip(panels[0], found.items()):
        for layer in dict.fromkeys(row["layer"] for row in both):
            values = {}
            for row in both:
                if row["layer"] == layer:
                    values.setdefault(row[x], []).append(row[y])
            at = sorted(values)
            means = [statistics.mean(values[place]) for place in at]
            deviations = [statistics.stdev(values[place]) if len(values[place]) > 1 else 0 for place in at]
            axes.errorbar(at, means, deviations, fmt="o-", capsize=3, label=layer, color=colors[layer])
        places = sorted({row[x] for row in both})
        if places[0] > 0 and places[-1] >= 4 * places[0]:
            axes.set_xscale("log", subs=[])
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a decade alone may have one place in view
        else:
            axes.locator_params(axis="x", nbins=5)  # of more, numbers of seven digits would run into each other
        if len(places) <= 6:  # more would run into each other
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_formatter("{x:,.7g}")
        axes.set(xlabel=x)
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0][0].set(ylabel=y)
    save(figure, path)


def draw_differences(path: str | Path, lines: Sequence[dict], baseline: str, columns: Sequence[str] | None) -> None:
    """How far each group's mean is from the baseline's, with its 95% interval; a panel for each score.

    Args:
        lines: those of :func:`~mixtape_plugin.analysis.statistics.compare`.
        columns: the scores to draw; None draws all that are compared.
    """
    scores = compared_in(dict.fromkeys(name for line in lines for name in line if line[name] is not None))
    scores = [score for score in columns or scores if score in scores]
    if not scores:
        raise UserError(f"--differences {path} has nothing to draw: no score has differences, which want several seeds")
    plt = pyplot()
    shown = [line for line in lines if any(interval_of(line, score)[0] is not None for score in scores)]
    names = [textwrap.fill(f"{line['group']} ({line['n']})", 40, break_on_hyphens=False) for line in shown]
    places = range(len(shown))
    across = min(3, len(scores))
    down = math.ceil(len(scores) / across)
    size = (2.5 + 3.5 * across, 0.5 + down * (0.9 + 0.42 * len(shown)))
    figure, panels = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    for axes in panels.flat[len(scores) :]:
        axes.remove()
    for axes, score in zip(panels.flat, scores):
        for place, line in zip(places, shown):
            middle, low, high = interval_of(line, score)
            if middle is not None:
                axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", capsize=3, color="C0")
        axes.axvline(0, color="k", linewidth=1)
        axes.set(xlabel=f"{score}, %" if is_ratio(score) else score, yticks=places, yticklabels=names)
        axes.grid(alpha=0.3, axis="x")
    panels[0][0].set_ylim(len(shown) - 0.5, -0.5)  # as the table has them
    figure.suptitle(textwrap.fill(f"difference from {baseline}", 20 * (1 + across), break_on_hyphens=False))
    save(figure, path)


def draw_overview(path: str | Path, found: Sequence[Comparison], score: str) -> None:
    """How far layers are from the baseline, a field for each comparison and a colour for each layer.

    With 95% intervals where they are known; single trainings without one are rings.
    """
    baseline, *layers = found[0].cells
    if not any(isinstance(value, Difference) for each in found for value in each.cells.values()):
        raise UserError(f"--differences {path} has nothing to draw: no layer has a difference from {baseline}")
    plt = pyplot()
    figure, axes = plt.subplots(constrained_layout=True)
    colors = plt.get_cmap("tab10" if len(layers) <= 10 else "tab20").colors
    names, handles = [], {}
    for row, comparison in enumerate(found):
        title = textwrap.fill(comparison.name, 40, break_on_hyphens=False)
        names.append(f"{title}\n{baseline} {comparison.baseline}")
        shown = {layer: value for layer, value in comparison.cells.items() if isinstance(value, Difference)}
        for number, (layer, value) in enumerate(shown.items()):
            color, known = colors[layers.index(layer) % len(colors)], value.low is not None
            reach = [[value.middle - value.low], [value.high - value.middle]] if known else None
            place = row + (number - (len(shown) - 1) / 2) / (1 + len(layers))
            drawn = axes.errorbar(
                value.middle, place, xerr=reach, fmt="o", color=color, mfc=color if known else "w", ms=5, capsize=2
            )
            handles.setdefault(layer, drawn)
    for row in range(1, len(found)):
        axes.axhline(row - 0.5, color="0.85", linewidth=1)
    axes.axvline(0, color="k", linewidth=1)
    axes.set(yticks=range(len(found)), yticklabels=names, ylim=(len(found) - 0.5, -0.5))
    unit = ", % (below 0 is better)" if is_ratio(score) else ""
    axes.set_xlabel(f"{score}, difference from {baseline}{unit}\nrings: single trainings, no interval")
    axes.grid(alpha=0.3, axis="x")
    most = max(name.count("\n") for name in names)
    figure.set_size_inches(8.5, 0.9 + len(found) * max(0.12 * (1 + len(layers)), 0.25 * (1 + most)))
    handles = {layer: handles[layer] for layer in layers if layer in handles}
    figure.legend(handles.values(), handles, loc="outside right upper")
    save(figure, path)


def draw_correlation(path: str | Path, found: Correlation, x: str, y: str) -> None:
    """One column over another, a colour for each layer."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4.5), constrained_layout=True)
    for layer in dict.fromkeys(row["layer"] for row in found.rows):
        rows = [row for row in found.rows if row["layer"] == layer]
        axes.scatter(numbers(rows, x), numbers(rows, y), label=layer or "unknown")
    axes.set(xlabel=x, ylabel=y, title=f"Pearson r = {found.r:.2f}, p = {found.p:.2g}, n = {len(found.rows)}")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
