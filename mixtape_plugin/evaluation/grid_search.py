"""What a grid search on a validation set leaves behind: a table, a CSV file and a heat map.

A row is a dictionary: the value of each hyper-parameter, ``perplexity``, and whatever else is worth a column.
"""

from __future__ import annotations

from pathlib import Path

from mixtape_plugin import drawing
from mixtape_plugin.files import write_csv
from mixtape_plugin.tables import aligned


def best(rows: list[dict]) -> dict:
    """The row of lowest perplexity, the first of equals."""
    return min(rows, key=lambda row: row["perplexity"])


def table(rows: list[dict]) -> str:
    """The rows as lines of text, the best one with a star."""
    winner = best(rows)
    cells = [["", *rows[0]]]
    for row in rows:
        values = [f"{value:,}" if isinstance(value, int) else f"{value:g}" for value in row.values()]
        values[list(row).index("perplexity")] = f"{row['perplexity']:.3f}"
        cells.append(["*" if row is winner else "", *values])
    return aligned(cells)


def save(rows: list[dict], folder: Path, x: str, y: str, title: str) -> None:
    """Writes search.csv, all rows, and search.png, perplexity over two hyper-parameters, at the best of the others."""
    write_csv(folder / "search.csv", list(rows[0]), rows)
    draw(rows, folder / "search.png", x, y, title)


def draw(rows: list[dict], path: Path, x: str, y: str, title: str) -> None:
    plt = drawing.pyplot()
    xs, ys = (sorted({row[name] for row in rows}) for name in (x, y))
    at = {(i, j): [row for row in rows if row[x] == i and row[y] == j] for i in xs for j in ys}
    grid = [[best(at[i, j])["perplexity"] for i in xs] for j in ys]
    figure, axes = plt.subplots(figsize=(2.5 + 0.9 * len(xs), 2 + 0.6 * len(ys)), constrained_layout=True)
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="YlGnBu", alpha=0.6)  # infinity stays white
    for column in range(len(xs)):
        for row in range(len(ys)):
            axes.text(column, row, f"{grid[row][column]:.2f}", ha="center", va="center", fontsize=8)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_xticks(range(len(xs)), [f"{value:g}" for value in xs])
    axes.set_yticks(range(len(ys)), [f"{value:g}" for value in ys])
    figure.colorbar(image, label="perplexity")
    drawing.save(figure, path)
