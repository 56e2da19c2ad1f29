"""Files that appear whole or not at all."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Callable, Iterable, Sequence


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Calls ``write`` with a temporary path beside ``path``, of the same ending, and moves the result into place."""
    path = Path(path)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(part)
        os.replace(part, path)
    finally:
        if part.exists():
            part.unlink()


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[dict]) -> None:
    """A line for the names of the columns and one for each row, which is a dictionary."""

    def write(part):
        with open(part, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)
