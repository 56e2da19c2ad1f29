"""Pictures: matplotlib without a display, and how a drawing becomes a file, which appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mixtape_plugin.errors import UserError
from mixtape_plugin.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg")  # what the name of one may end in
ENDINGS = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"


def check_picture(option: str, path: str | Path | None) -> None:
    """Raises UserError where an option, None where it is not given, names no picture."""
    if path and Path(path).suffix.lower() not in PICTURES:
        raise UserError(f"{option} {path} is not allowed: a name that ends in {ENDINGS}")


def pyplot() -> ModuleType:
    """matplotlib.pyplot, imported where something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Figure, path: str | Path) -> None:
    write_whole(path, lambda part: figure.savefig(part, dpi=150))
    pyplot().close(figure)
