"""Pictures: matplotlib without a display, and how a drawing becomes a file, which appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mixtape_plugin.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg")  # what the name of one may end in


def pyplot() -> ModuleType:
    """matplotlib.pyplot, imported where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(plt: ModuleType, figure: Figure, path: str | Path) -> None:
    write_whole(path, lambda part: figure.savefig(part, dpi=150))
    plt.close(figure)
