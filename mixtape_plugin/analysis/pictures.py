"""The drawings of scripts/analyze.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixtape_plugin.drawing import pyplot, save


def draw_singular_values(path: str | Path, sigma: dict, thresholds: dict) -> None:
    """Three views of the singular values of log P: the share that is at most x (Yang et al. 2018, figure 1), all on
    logarithmic axes with the threshold of the rank (Parthiban et al. 2021, supplement), and the first 500 (its
    figure 7).

    Args:
        sigma: model -> its singular values, descending.
        thresholds: model -> its rank and the threshold over σ_max.
    """
    plt = pyplot()
    figure, (share, decay, first) = plt.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    for name, values in sigma.items():
        relative = np.asarray(values) / values[0]
        positive = relative[relative > 0]
        index = np.arange(1, len(relative) + 1)
        rank, threshold = thresholds[name]
        share.plot(positive[::-1], (index / len(index))[len(relative) - len(positive) :], label=name)
        (line,) = decay.plot(index[: len(positive)], positive, label=f"{name}: {rank:,}")
        decay.plot(rank, relative[rank - 1], "o", color=line.get_color(), markersize=4)
        first.plot(index[:500], relative[:500], label=name)
    threshold = max(threshold for _, threshold in thresholds.values())
    decay.axhline(threshold, color="k", linestyle=":", linewidth=1, label="threshold of the rank")
    share.axvline(threshold, color="k", linestyle=":", linewidth=1)
    lowest = threshold / 1e4  # what is below is rounding
    share.set(xscale="log", xlim=(lowest, 1), xlabel="σ / σ_max", ylabel="share of σ at most as large", ylim=(0, 1))
    decay.set(xscale="log", yscale="log", ylim=(lowest, 1.5), xlabel="index", ylabel="σ / σ_max")
    first.set(ylim=(0, 0.2), xlim=(1, 500), xlabel="index", ylabel="σ / σ_max")
    share.set_title("singular values of log P")
    decay.set_title("rank")
    first.set_title("the largest 500")
    share.legend()
    decay.legend()
    save(figure, path)


def draw_hits(path: str | Path, hits: dict, groups: dict, k: int) -> None:
    """Models × positions: coloured where the reference is among the k likeliest (Parthiban et al. 2021, figure 3).

    Args:
        hits: model -> title of a group -> a truth value for each of its positions.
        groups: title of a group -> labels of its positions.
    """
    plt = pyplot()
    columns = sum(map(len, groups.values()))
    figure, axes = plt.subplots(figsize=(max(3.5 + 0.42 * columns, 6), 2 + 0.35 * len(hits)), constrained_layout=True)
    grid = np.array([[hit for title in groups for hit in rows[title]] for rows in hits.values()], dtype=float)
    axes.imshow(grid, cmap="Greens", vmin=0, vmax=1.6, aspect="auto")
    axes.set_yticks(range(len(hits)), [f"{name}: {int(row.sum())}" for name, row in zip(hits, grid)])
    axes.set_xticks(range(columns), [label for labels in groups.values() for label in labels], rotation=60, ha="right")
    axes.set_xticks(np.arange(0.5, columns - 0.5), minor=True)
    axes.set_yticks(np.arange(0.5, len(hits) - 0.5), minor=True)
    axes.grid(which="minor", color="w", linewidth=2)
    axes.tick_params(which="both", length=0)
    begin = 0
    for title, labels in groups.items():
        place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8}
        axes.text(begin + len(labels) / 2 - 0.5, 1.02, title, **place)
        begin += len(labels)
        if begin < columns:
            axes.axvline(begin - 0.5, color="k", linewidth=1)
    figure.suptitle(f"positions (line:word) whose word is among the {k} likeliest, and how many", fontsize=10)
    save(figure, path)


def draw_similarity(path: str | Path, results: dict) -> None:
    """Spearman's ρ of each set and model, with its bootstrap interval.

    Args:
        results: model -> set -> :class:`~mixtape_plugin.analysis.word_similarity.Similarity`.
    """
    plt = pyplot()
    sets = list(next(iter(results.values())))
    figure, axes = plt.subplots(figsize=(2.5 + 0.9 * len(sets), 4.6), constrained_layout=True)
    for number, (name, found) in enumerate(results.items()):
        shift = (number - (len(results) - 1) / 2) * 0.7 / len(results)
        rated = [(at + shift, found[s]) for at, s in enumerate(sets) if found[s].rho is not None]
        if not rated:
            continue
        errors = [
            [max(r.rho - r.interval[0], 0) for _, r in rated],
            [max(r.interval[1] - r.rho, 0) for _, r in rated],
        ]
        at = [x for x, _ in rated]
        axes.errorbar(at, [r.rho for _, r in rated], errors, fmt="o", markersize=4, linewidth=1, label=name)
    axes.axhline(0, color="k", linewidth=0.8)
    pairs = next(iter(results.values()))
    labels = [f"{name[3:] if name.startswith('EN-') else name}\n({pairs[name].pairs})" for name in sets]
    axes.set_xticks(range(len(sets)), labels, rotation=45, ha="right")
    axes.set(ylabel="Spearman's ρ", title="word similarity, with 95% bootstrap intervals (pairs in the dictionary)")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    save(figure, path)


def draw_frequency(path: str | Path, rows: list) -> None:
    """By classes of tokens: the perplexity of each model's targets, and, where there are several models, how far its
    part of the loss is from the first one's, with 95% intervals.

    Args:
        rows: of :func:`mixtape_plugin.analysis.frequency.by_frequency`, without those of all tokens.
    """
    plt = pyplot()
    models, ranks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("training", "rank"))
    panels = min(len(models), 2)
    figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4.4), constrained_layout=True, squeeze=False)
    left, right = axes[0, 0], axes[0, -1]
    for number, model in enumerate(models):
        mine = [row for row in rows if row["training"] == model]
        (line,) = left.plot(ranks, [row["perplexity"] for row in mine], "o-", markersize=4, label=model)
        if number:
            at = np.arange(len(ranks)) + (number - len(models) / 2) * 0.5 / len(models)
            gap, interval = ([row[key] for row in mine] for key in ("difference", "interval"))
            right.errorbar(at, gap, interval, fmt="o", markersize=4, capsize=2, color=line.get_color(), label=model)
    left.set(yscale="log", ylabel="perplexity of these targets", title="by rank of the target in the dictionary")
    if panels == 2:
        right.axhline(0, color="k", linewidth=0.8)
        right.set(ylabel="nats a token of the text", title=f"part of the loss, from {models[0]}'s (negative: better)")
        right.set_xticks(range(len(ranks)), ranks)
    for panel in axes.flat:
        panel.tick_params(axis="x", rotation=30)
        panel.grid(alpha=0.3, axis="y")
    left.legend()
    save(figure, path)


def draw_mixing(path: str | Path, rows: list, measures: dict) -> None:
    """By classes of tokens, a panel for each measure of how mixtures mix.

    Args:
        rows: of :func:`mixtape_plugin.analysis.mixing.by_frequency`, without those of all tokens.
        measures: column -> its title.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 7), constrained_layout=True, sharex=True)
    for panel, (measure, title) in zip(axes.flat, measures.items()):
        for model in dict.fromkeys(row["training"] for row in rows):
            mine = [row for row in rows if row["training"] == model]
            label = f"{model}, K = {mine[0]['K']}"
            panel.plot([r["rank"] for r in mine], [r[measure] for r in mine], "o-", markersize=4, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_ylabel(measure)
        panel.tick_params(axis="x", rotation=30)
        panel.grid(alpha=0.3, axis="y")
    axes[0, 0].legend()
    figure.suptitle("by rank of the target in the dictionary", fontsize=10)
    save(figure, path)
